//! The fronts of KServe's inference protocol: HTTP ([`http`]) and gRPC ([`grpc`], its stream of many requests in
//! [`stream`]).

pub(crate) mod grpc;
pub(crate) mod http;
mod stream;

use std::sync::Arc;

use crate::answers::Answers;
use crate::dialect::kserve::compose::{Composer, Shape};
use crate::dialect::kserve::describe::Listed;
use crate::dialect::kserve::inference::Inference;
use crate::dialect::kserve::request::convert;
use crate::dialect::kserve::tensor::Output;
use crate::fault::Fault;
use crate::models::Model;
use crate::service::{Service, Ticket};
use crate::statistics::ModelStatistics;

/// Label of these requests in metrics.
const DIALECT: &str = "kserve";

/// A running inference. Dropping it cancels it everywhere.
struct Running {
    answers: Answers,
    composer: Composer,
    /// What the request says of its responses.
    stream: bool,
    /// Sequences that go on.
    unfinished: usize,
}

impl Running {
    /// Admits the request and waits for its first token.
    async fn start(
        service: &Arc<Service>,
        model: &Model,
        inference: Inference,
        ticket: &mut Ticket,
    ) -> Result<Self, Fault> {
        let (request, shape) = convert(&service.config, &model.description.name, inference)?;
        let Shape { stream, sequences, .. } = shape;
        let answers = service.start(vec![request], ticket).await?;
        Ok(Self { answers, composer: Composer::new(shape), stream, unfinished: sequences })
    }

    /// The whole answer.
    async fn whole(&mut self) -> Result<Vec<Output>, Fault> {
        let wholes = self.answers.whole().await?;
        Ok(self.composer.whole(&self.answers.started()[0], &wholes))
    }

    /// What comes next, and whether it is the last; `None` after that.
    async fn next(&mut self) -> Result<Option<(Vec<Output>, bool)>, Fault> {
        let Some((choice, piece)) = self.answers.next().await? else { return Ok(None) };
        self.unfinished -= usize::from(piece.finish.is_some());
        let outputs = self.composer.piece(&self.answers.started()[0], choice, &piece);
        Ok(Some((outputs, self.unfinished == 0)))
    }
}

/// Every served model, and whether it can be used.
fn listed(service: &Service) -> Vec<Listed> {
    let served = service.served.borrow().clone();
    let ready = service.is_ready() && served.placeable;
    let models = served.models.iter();
    models.map(|model| Listed { name: model.description.name.clone(), ready }).collect()
}

/// What a model has served; every model without a name.
fn statistics(service: &Service, model: Option<&Model>) -> Vec<(String, ModelStatistics)> {
    let of = |model: &Model| {
        let name = model.description.name.clone();
        let statistics = service.statistics.of(&name);
        (name, statistics)
    };
    match model {
        Some(model) => vec![of(model)],
        None => service.served.borrow().models.iter().map(|model| of(model)).collect(),
    }
}
