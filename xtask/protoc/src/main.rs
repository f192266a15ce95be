//! The protocol buffers compiler, as far as the build scripts of dependencies use it: `.proto` files in, a set of
//! descriptors out. Cargo finds it by the variable `PROTOC` in `.cargo/config.toml`, so a build needs nothing that is
//! installed by hand.

use std::error::Error;
use std::ffi::OsString;
use std::path::PathBuf;
use std::{env, fs};

/// The version to claim: the first whose language the compiler behind this understands in full.
const VERSION: &str = "libprotoc 31.1";

fn main() -> Result<(), Box<dyn Error>> {
    let (mut includes, mut files, mut out) = (Vec::new(), Vec::new(), None);
    let mut arguments = env::args_os().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().map(PathBuf::from).ok_or("an option lacks its value");
        match argument.to_str() {
            Some("--version") => {
                println!("{VERSION}");
                return Ok(());
            }
            Some("-I") => includes.push(value()?),
            Some("-o") => out = Some(value()?),
            Some("--include_imports" | "--include_source_info") => {}
            Some(flag) if flag.starts_with('-') => return Err(format!("unknown option {flag}").into()),
            _ => files.push(PathBuf::from(OsString::from(&argument))),
        }
    }
    let mut compiler = protox::Compiler::new(includes)?;
    compiler.include_imports(true).include_source_info(true).open_files(files)?;
    fs::write(out.ok_or("-o is missing")?, compiler.encode_file_descriptor_set())?;
    Ok(())
}
