//! The standard gRPC health and reflection services, which every server has.

use std::collections::HashSet;

use prost::Message;
use prost_types::FileDescriptorSet;
use proto::Reason;
use tonic::service::Routes;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::{Error, Shutdown};

/// The health of one server: SERVING for each of its services, NOT_SERVING once the process drains.
#[derive(Clone, Debug)]
pub(crate) struct Health {
    reporter: HealthReporter,
    services: Vec<&'static str>,
}

impl Health {
    /// Adds health and reflection to the routes. All services start as SERVING.
    pub(crate) async fn install(
        routes: Routes,
        services: Vec<&'static str>,
    ) -> Result<(Self, Routes), Error> {
        let (reporter, server) = tonic_health::server::health_reporter();
        let files = files_of(&services)?;
        let health = Self { reporter, services };
        health.set(true).await;
        let routes = routes
            .add_service(server)
            .add_service(reflection(files.clone()).build_v1().map_err(broken)?)
            .add_service(reflection(files).build_v1alpha().map_err(broken)?);
        Ok((health, routes))
    }

    /// Reports every service, and the server as a whole (the empty name), as serving or not.
    pub(crate) async fn set(&self, serving: bool) {
        let status = if serving { ServingStatus::Serving } else { ServingStatus::NotServing };
        for service in self.services.iter().copied().chain([""]) {
            self.reporter.set_service_status(service, status).await;
        }
    }

    /// Reports NOT_SERVING from the drain on.
    pub(crate) async fn follow(self, shutdown: Shutdown) {
        shutdown.draining().await;
        self.set(false).await;
    }
}

fn reflection(files: FileDescriptorSet) -> tonic_reflection::server::Builder<'static> {
    tonic_reflection::server::Builder::configure()
        .register_file_descriptor_set(files)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
}

/// The files that define these services, and those that they import: what a server tells of itself says nothing of
/// services that it does not have.
fn files_of(services: &[&str]) -> Result<FileDescriptorSet, Error> {
    let all = FileDescriptorSet::decode(proto::wire::DESCRIPTORS).map_err(|error| broken(error.into()))?;
    let full_name = |package: &str, name: &str| {
        if package.is_empty() { name.to_owned() } else { format!("{package}.{name}") }
    };
    let mut wanted: Vec<&str> = all
        .file
        .iter()
        .filter(|file| {
            let mut names = file.service.iter().map(|service| full_name(file.package(), service.name()));
            names.any(|name| services.contains(&name.as_str()))
        })
        .map(prost_types::FileDescriptorProto::name)
        .collect();
    let mut found = HashSet::new();
    while let Some(name) = wanted.pop() {
        if let Some(file) = all.file.iter().find(|file| file.name() == name)
            && found.insert(name)
        {
            wanted.extend(file.dependency.iter().map(String::as_str));
        }
    }
    let files = all.file.iter().filter(|file| found.contains(file.name())).cloned().collect();
    Ok(FileDescriptorSet { file: files })
}

fn broken(error: tonic_reflection::server::Error) -> Error {
    proto::Error::new(Reason::Internal, format!("descriptors: {error}")).into()
}
