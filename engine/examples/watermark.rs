//! Looks for the watermark in a text: `watermark MODEL KEY GAMMA < TEXT`.
//!
//! Prints how many of the text's token pairs are green, and by how many standard deviations that is more than chance.

use std::io::Read as _;
use std::path::Path;

use checkpoint::{Checkpoint, Encode};
use engine::watermark::detect;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, key, gamma] = arguments.as_slice() else {
        return Err("usage: watermark MODEL KEY GAMMA < TEXT".into());
    };
    let (key, gamma) = (key.parse::<u64>()?, gamma.parse::<f32>()?);
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text)?;
    let checkpoint = Checkpoint::open(Path::new(model))?;
    let tokens = checkpoint.bundle()?.open()?.encode(&text, Encode::default())?;
    let found = detect(key, gamma, &tokens);
    println!("{} of {} token pairs are green, z = {:.2}", found.green, found.scored, found.z);
    println!("{}", if found.z > 4.0 { "marked with this key" } else { "no sign of this key" });
    Ok(())
}
