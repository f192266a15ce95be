//! The simulated model as a worker serves it: [`engine::sim`] with a shape, and with a price in time.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

use engine::batch::{Batch, Logits};
use engine::model::{ForwardError, Interrupt, Model};
use engine::sim::{SimConfig, SimKv, SimModel};
use proto::Error;

/// In front of the description of a simulated model.
pub(crate) const PREFIX: &str = "sim:";

/// How often a simulated step looks whether it is to stop.
const INTERRUPT_POLL: Duration = Duration::from_millis(1);

/// A simulated model. As text `sim:`, then what differs from the default: `sim:vocab=4096,context_len=8192,step_us=500`,
/// or the shape alone as five numbers: `sim:LAYERS,KV_HEADS,HEAD_DIM,VOCAB,CONTEXT_LEN`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sim {
    /// Shape of the model.
    pub shape: SimConfig,
    /// What a step costs.
    pub cost: SimCost,
}

/// How long a step of a simulated model takes at least: these costs added up. Nothing by default, and then it takes as long as it takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SimCost {
    /// Of each step.
    pub step: Duration,
    /// Of each token of a chunk of several.
    pub prefill_token: Duration,
    /// Of each token that is a chunk of its own, as in decode.
    pub decode_token: Duration,
}

impl SimCost {
    /// The price of a batch.
    fn of(&self, batch: &Batch) -> Duration {
        let decode = batch.chunks.iter().filter(|chunk| chunk.tokens.len() == 1).count();
        let prefill = batch.len() - decode;
        self.step + self.prefill_token * prefill as u32 + self.decode_token * decode as u32
    }
}

impl From<SimConfig> for Sim {
    fn from(shape: SimConfig) -> Self {
        Self { shape, cost: SimCost::default() }
    }
}

impl Sim {
    /// A number and its name in the text.
    fn shape_fields(&mut self) -> [(&'static str, &mut usize); 5] {
        let SimConfig { layers, kv_heads, head_dim, vocab, context_len } = &mut self.shape;
        [
            ("layers", layers),
            ("kv_heads", kv_heads),
            ("head_dim", head_dim),
            ("vocab", vocab),
            ("context_len", context_len),
        ]
    }

    /// A cost and its name in the text, where it is a whole number of microseconds.
    fn cost_fields(&mut self) -> [(&'static str, &mut Duration); 3] {
        let SimCost { step, prefill_token, decode_token } = &mut self.cost;
        [("step_us", step), ("prefill_token_us", prefill_token), ("decode_token_us", decode_token)]
    }

    /// Sets a number by its name. `None` when there is none of that name, or the number is out of its range.
    fn set(&mut self, name: &str, number: &str) -> Option<()> {
        if let Some((_, field)) = self.shape_fields().into_iter().find(|(known, _)| *known == name) {
            *field = positive(number)?;
            return Some(());
        }
        let (_, field) = self.cost_fields().into_iter().find(|(known, _)| *known == name)?;
        *field = Duration::from_micros(number.parse::<u32>().ok()?.into());
        Some(())
    }
}

/// What a token id, and a size in memory, may be: within 31 bits.
fn positive(number: &str) -> Option<usize> {
    number.parse().ok().filter(|number| (1..=i32::MAX as usize).contains(number))
}

impl FromStr for Sim {
    type Err = Error;

    /// Reads the whole text, `sim:` included.
    fn from_str(text: &str) -> Result<Self, Error> {
        let mut sim = Self::default();
        let expected = || {
            let names: Vec<&str> = {
                let mut sim = Self::default();
                let shape = sim.shape_fields().map(|(name, _)| name);
                shape.into_iter().chain(sim.cost_fields().map(|(name, _)| name)).collect()
            };
            let what = format!(
                "{PREFIX}LAYERS,KV_HEADS,HEAD_DIM,VOCAB,CONTEXT_LEN or {PREFIX}NAME=NUMBER,… expected, with names \
                 {}; {text} came",
                names.join(", ")
            );
            Error::invalid("model", what)
        };
        let parts: Vec<&str> = match text.strip_prefix(PREFIX).ok_or_else(expected)? {
            "" => Vec::new(),
            parts => parts.split(',').collect(),
        };
        if parts.iter().any(|part| part.contains('=')) {
            for part in parts {
                part.split_once('=').and_then(|(name, number)| sim.set(name, number)).ok_or_else(expected)?;
            }
        } else if !parts.is_empty() {
            let fields = sim.shape_fields();
            if parts.len() != fields.len() {
                return Err(expected());
            }
            for ((_, field), number) in fields.into_iter().zip(parts) {
                *field = positive(number).ok_or_else(expected)?;
            }
        }
        Ok(sim)
    }
}

impl fmt::Display for Sim {
    /// The shape in full, and the costs that there are.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut sim = *self;
        let shape = sim.shape_fields().map(|(name, number)| format!("{name}={number}"));
        write!(f, "{PREFIX}{}", shape.join(","))?;
        for (name, cost) in sim.cost_fields().into_iter().filter(|(_, cost)| !cost.is_zero()) {
            write!(f, ",{name}={}", cost.as_micros())?;
        }
        Ok(())
    }
}

/// A [`SimModel`] that takes its time. It sleeps for it, so a thousand workers fit on one machine.
#[derive(Clone, Debug)]
pub struct TimedSim {
    model: SimModel,
    cost: SimCost,
}

impl TimedSim {
    /// The model as described.
    pub fn new(sim: Sim) -> Self {
        Self { model: SimModel::new(sim.shape), cost: sim.cost }
    }
}

impl Model for TimedSim {
    type Kv = SimKv;

    fn vocab_size(&self) -> usize {
        self.model.vocab_size()
    }

    fn context_len(&self) -> usize {
        self.model.context_len()
    }

    fn new_kv(&self, blocks: usize, block_tokens: usize) -> Result<SimKv, ForwardError> {
        self.model.new_kv(blocks, block_tokens)
    }

    fn forward(
        &mut self,
        batch: &Batch,
        kv: &mut SimKv,
        interrupt: &Interrupt,
        logits: &mut Logits,
    ) -> Result<(), ForwardError> {
        let end = Instant::now() + self.cost.of(batch);
        self.model.forward(batch, kv, interrupt, logits)?;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            if interrupt.is_raised() {
                return Err(ForwardError::Interrupted);
            }
            std::thread::sleep(left.min(INTERRUPT_POLL));
        }
    }
}

#[cfg(test)]
mod tests {
    use engine::batch::Chunk;

    use super::*;

    #[test]
    fn models_read_as_they_print() {
        let shape = SimConfig { layers: 3, kv_heads: 2, head_dim: 8, vocab: 100, context_len: 64 };
        let cost = SimCost { decode_token: Duration::from_micros(5), ..SimCost::default() };
        let sim = Sim { shape, cost };
        assert_eq!(
            sim.to_string(),
            "sim:layers=3,kv_heads=2,head_dim=8,vocab=100,context_len=64,decode_token_us=5"
        );
        assert_eq!(sim.to_string().parse(), Ok(sim));
        assert_eq!("sim:".parse(), Ok(Sim::default()));
        assert_eq!("sim:3,2,8,100,64".parse(), Ok(Sim::from(shape)));
        let step = SimCost { step: Duration::from_millis(2), ..SimCost::default() };
        assert_eq!("sim:step_us=2000".parse(), Ok(Sim { cost: step, ..Sim::default() }));
        for wrong in [
            "sim",
            "sim:1",
            "sim:1,2,3,4,0",
            "sim:a,b,c,d,e",
            "sim:1,2,3,4,5,6",
            "sim:vocab=0",
            "sim:vocab=4294967296",
            "sim:vocab=4,3",
            "sim:step_us=-1",
            "sim:colour=1",
            "sim:vocab=1,",
        ] {
            let error = wrong.parse::<Sim>().unwrap_err();
            assert!(error.message.starts_with("model: "), "{error}");
        }
    }

    /// A batch with chunks of these lengths.
    fn batch(chunks: &[usize]) -> Batch {
        let (mut batch, mut start) = (Batch::default(), 0);
        for len in chunks {
            batch.chunks.push(Chunk { tokens: start..start + len, block_table: 0..1 });
            start += len;
        }
        batch.tokens = vec![0; start];
        batch
    }

    #[test]
    fn a_step_costs_what_its_tokens_do() {
        let cost = SimCost {
            step: Duration::from_millis(1),
            prefill_token: Duration::from_micros(10),
            decode_token: Duration::from_micros(100),
        };
        assert_eq!(cost.of(&batch(&[1, 1, 1])), Duration::from_micros(1300));
        assert_eq!(cost.of(&batch(&[5, 1])), Duration::from_micros(1150));
        assert_eq!(SimCost::default().of(&batch(&[5, 1])), Duration::ZERO);
    }

    #[test]
    fn a_long_step_can_be_interrupted() {
        let cost = SimCost { step: Duration::from_hours(1), ..SimCost::default() };
        let mut model = TimedSim::new(Sim { cost, ..Sim::default() });
        let interrupt = Interrupt::default();
        let raised = interrupt.clone();
        let raise = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(5));
            raised.raise();
        });
        let outcome = model.forward(
            &Batch::default(),
            &mut model.new_kv(1, 16).unwrap(),
            &interrupt,
            &mut Logits::default(),
        );
        raise.join().unwrap();
        assert_eq!(outcome, Err(ForwardError::Interrupted));
    }
}
