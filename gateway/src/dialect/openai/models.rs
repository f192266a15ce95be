//! `GET /v1/models` and `GET /v1/models/{id}`.

use serde::Serialize;

use crate::dialect::json;
use crate::models::Model;

#[derive(Serialize)]
struct ModelObject<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
}

#[derive(Serialize)]
struct List<'a> {
    object: &'static str,
    data: Vec<ModelObject<'a>>,
}

fn object(model: &Model, created: u64) -> ModelObject<'_> {
    ModelObject { id: &model.description.name, object: "model", created, owned_by: "baton" }
}

/// One model; `created` in seconds of Unix time.
pub(crate) fn model(model: &Model, created: u64) -> String {
    json(&object(model, created))
}

/// All of them.
pub(crate) fn models<'a>(models: impl Iterator<Item = &'a Model>, created: u64) -> String {
    json(&List { object: "list", data: models.map(|model| object(model, created)).collect() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dialect::tests::started;

    #[test]
    fn models_are_listed_as_objects() {
        let started = started("a/b", 1, None);
        assert_eq!(
            models([&*started.model].into_iter(), 7),
            "{\"object\":\"list\",\"data\":[{\"id\":\"a/b\",\"object\":\"model\",\"created\":7,\"owned_by\":\"baton\"}]}"
        );
        assert_eq!(
            model(&started.model, 7),
            "{\"id\":\"a/b\",\"object\":\"model\",\"created\":7,\"owned_by\":\"baton\"}"
        );
    }
}
