//! What stands before every route: the request's name, what pages of other origins may do, keys. And how a body is
//! read, whatever the route.

pub(crate) mod body;
mod coding;
mod cors;
mod keys;
mod request_id;
mod services;

use axum::Router;
use axum::middleware::{from_fn, from_fn_with_state};
use node::{Error, Public, Tls, TlsFiles};

use crate::Config;
use cors::Cors;
use keys::Keys;
pub(crate) use services::services;

/// The layers that stand before the routes of HTTP and the calls of gRPC.
pub(crate) struct Front {
    cors: Cors,
    /// `None` where everybody is served.
    keys: Option<Keys>,
}

impl Front {
    /// Reads its options, and the files that they name.
    ///
    /// # Errors
    /// An option without a valid value.
    pub(crate) fn read(config: &Config) -> Result<Self, Error> {
        Ok(Self { cors: Cors::read(config)?, keys: Keys::read(config)? })
    }

    /// Puts the layers around routes of HTTP. The outermost names the request; other origins come before keys, since a
    /// browser asks what it may do without naming one.
    pub(crate) fn http(&self, mut routes: Router) -> Router {
        if let Some(keys) = &self.keys {
            routes = routes.layer(from_fn_with_state(keys.clone(), keys::check_http));
        }
        self.cors.around(routes).layer(from_fn(request_id::layer))
    }

    /// Puts the layers around calls of gRPC.
    pub(crate) fn grpc(&self, calls: Router) -> Router {
        let mut calls = calls.layer(from_fn(coding::mirror));
        if let Some(keys) = &self.keys {
            calls = calls.layer(from_fn_with_state(keys.clone(), keys::check_grpc));
        }
        calls.layer(from_fn(request_id::layer))
    }
}

/// How listeners meet clients.
///
/// # Errors
/// A TLS file that cannot be used.
pub(crate) fn public(config: &Config) -> Result<Public, Error> {
    let files = TlsFiles {
        cert: config.tls_cert.as_deref(),
        key: config.tls_key.as_deref(),
        client_ca: config.tls_client_ca.as_deref(),
    };
    Ok(Public {
        tls: Tls::read(files)?,
        tls_handshake: config.tls_handshake,
        streams_max: config.streams_max,
    })
}
