//! Rotary position embedding: the angles.
//!
//! Pair i of a head turns by `position * base^(-2i / dim)`. Cosine, sine and the root are computed here in f64 from
//! the four operations alone, since a system's own may differ in the last bit, and workers on different systems
//! must agree.

use checkpoint::RopePairing;

/// The turns of each position, computed as far as sequences have come.
#[derive(Clone, Debug)]
pub struct Rope {
    /// Which two elements of a head are turned together.
    pub pairing: RopePairing,
    /// Radians per position, pair by pair. `[dim / 2]`
    frequencies: Vec<f64>,
    /// Cosine and sine. `[positions][dim / 2]`
    turns: Vec<[f32; 2]>,
}

impl Rope {
    /// The embedding of `dim` elements (even) of each head. `stretch[i]` divides the frequency of pair i; empty
    /// means 1.
    pub fn new(base: f32, dim: usize, pairing: RopePairing, stretch: &[f32]) -> Self {
        let pairs = dim / 2;
        let root = root(f64::from(base), pairs);
        let mut frequency = 1.0;
        let frequencies = (0..pairs).map(|i| {
            let stretched = frequency / stretch.get(i).copied().map_or(1.0, f64::from);
            frequency /= root;
            stretched
        });
        Self { pairing, frequencies: frequencies.collect(), turns: Vec::new() }
    }

    /// Computes the turns of all positions below `positions` that are not there yet.
    pub fn reach(&mut self, positions: usize) {
        let known = self.turns.len().checked_div(self.frequencies.len()).unwrap_or(positions);
        for position in known..positions {
            for frequency in &self.frequencies {
                let (sin, cos) = sin_cos(position as f64 * frequency);
                self.turns.push([cos as f32, sin as f32]);
            }
        }
    }

    /// Pairs of a head.
    pub fn pairs(&self) -> usize {
        self.frequencies.len()
    }

    /// Cosine and sine of each pair at every position that was reached, one after the other. `[positions * dim / 2]`
    pub fn all_turns(&self) -> &[[f32; 2]] {
        &self.turns
    }

    /// Cosine and sine of each pair at a position that was reached. `[dim / 2]`
    pub fn turns(&self, position: usize) -> &[[f32; 2]] {
        let pairs = self.frequencies.len();
        &self.turns[position * pairs..][..pairs]
    }
}

/// The positive `degree`-th root of `x > 0`, by bisection.
fn root(x: f64, degree: usize) -> f64 {
    let power = |y: f64| (0..degree).fold(1.0, |product, _| product * y);
    let (mut low, mut high) = (0.0, x.max(1.0));
    loop {
        let middle = low + (high - low) / 2.0;
        if middle <= low || middle >= high {
            return high;
        }
        if power(middle) < x { low = middle } else { high = middle }
    }
}

/// Sine and cosine of `x >= 0`. Reduced to ±π/4 by a three-part π/2, then the Taylor series; within 1e-15 up to
/// a million radians.
fn sin_cos(x: f64) -> (f64, f64) {
    /// π/2: its first 33 bits, its next 33 bits, the rest. Source: FreeBSD's `e_rem_pio2.c`.
    const HALF_PI: [f64; 3] =
        [1.570_796_326_734_125_6, 6.077_100_506_303_966e-11, 2.022_266_248_795_950_6e-21];
    let quarter_turns = (x * std::f64::consts::FRAC_2_PI).round();
    let mut r = x;
    for part in HALF_PI {
        r -= quarter_turns * part;
    }
    let square = r * r;
    let (mut sin, mut cos) = (1.0, 1.0);
    for k in (1..=9).rev() {
        let k = f64::from(2 * k);
        sin = 1.0 - square / (k * (k + 1.0)) * sin;
        cos = 1.0 - square / (k * (k - 1.0)) * cos;
    }
    let sin = sin * r;
    match quarter_turns as u64 % 4 {
        0 => (sin, cos),
        1 => (cos, -sin),
        2 => (-sin, -cos),
        _ => (-cos, sin),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sine_and_cosine_are_right() {
        for i in 0..200_000 {
            let x = f64::from(i) * 0.731;
            let (sin, cos) = sin_cos(x);
            assert!((sin - x.sin()).abs() < 1e-14 && (cos - x.cos()).abs() < 1e-14, "{x}: {sin} {cos}");
        }
    }

    #[test]
    fn frequencies_are_powers_of_the_base() {
        for (base, dim) in
            [(10_000.0, 64), (100_000.0, 64), (1e6, 128), (500_000.0, 80), (1.0, 2), (10_000.0, 256)]
        {
            let rope = Rope::new(base, dim, RopePairing::Adjacent, &[]);
            for (i, frequency) in rope.frequencies.iter().enumerate() {
                let exact = f64::from(base).powf(-2.0 * i as f64 / dim as f64);
                assert!((frequency - exact).abs() < 1e-12 * exact, "{base} {dim} {i}: {frequency} {exact}");
            }
        }
    }

    #[test]
    fn reaching_in_steps_is_reaching_at_once() {
        let mut steps = Rope::new(10_000.0, 8, RopePairing::Halves, &[1.0, 2.0, 4.0, 8.0]);
        let mut once = steps.clone();
        for positions in [1, 2, 2, 10, 7, 33] {
            steps.reach(positions);
        }
        once.reach(33);
        assert_eq!(steps.turns, once.turns);
        assert_eq!(steps.turns(0), [[1.0, 0.0]; 4]);
        assert_eq!(steps.turns(32).len(), 4);
        let angle: f64 = 32.0 * 0.1 / 2.0;
        assert_eq!(steps.turns(32)[1], [angle.cos() as f32, angle.sin() as f32]);
    }
}
