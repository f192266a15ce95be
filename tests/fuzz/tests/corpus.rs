//! Every property holds on the committed corpus, which keeps what a fuzzer once found.

use std::fs;
use std::path::Path;

#[test]
fn every_property_holds_on_its_corpus() {
    for (name, property) in baton_fuzz::TARGETS {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
        let files = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        let mut count = 0;
        for file in files {
            let path = file.expect("a folder that can be read").path();
            println!("{}", path.display());
            property(&fs::read(&path).expect("a file that can be read"));
            count += 1;
        }
        assert!(count > 0, "{name}: a corpus of at least one file");
    }
}
