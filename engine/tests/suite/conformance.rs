//! The simulated model keeps the contract of models, so what is tested on it holds for others.

use engine::model::conformance;
use engine::sim::{SimConfig, SimModel};

#[test]
fn the_simulated_model_conforms() {
    conformance::check(|| SimModel::new(SimConfig::default()));
    let odd = SimConfig { layers: 3, kv_heads: 3, head_dim: 5, vocab: 64, context_len: 64 };
    conformance::check(|| SimModel::new(odd));
}
