//! The check before every request that may change something.
//!
//! Owns the rule that such a request begins only while its client is there and the daemon does not stop, whatever it changes. A
//! request whose handler waits later looks again there. Must not know what a request does.

use axum::Extension;
use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, Request, State};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::Response;

use super::context::SharedApi;
use crate::answer::Refusal;
use crate::audit::Audit;

/// Passes a request on to its handler, or refuses it.
pub(super) async fn may_begin(
    State(api): SharedApi,
    Extension(audit): Extension<Audit>,
    request: Request,
    next: Next,
) -> Result<Response, Refusal> {
    if matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS) {
        return Ok(next.run(request).await);
    }
    // The end of a connection is seen behind the last byte of the request.
    let (parts, body) = request.into_parts();
    let body = Bytes::from_request(Request::from_parts(parts.clone(), body), &()).await;
    let body = body.map_err(|e| Refusal::new(e.status(), e.body_text()))?;
    let mut may = audit.asked().client.is_there().await;
    // A job that keeps the stop waiting can be cancelled.
    if parts.method != Method::DELETE || !parts.uri.path().starts_with("/v1/jobs/") {
        may = may.and_then(|()| api.registry.inventory.workers.refuse_while_stopping());
    }
    if let Err(refused) = may {
        // The handler, which knows better words for it, is not called.
        let request = format!("{} {} {}", parts.method, parts.uri.path(), String::from_utf8_lossy(&body));
        audit.does(request.trim_end());
        return Err(refused.into());
    }
    Ok(next.run(Request::from_parts(parts, Body::from(body))).await)
}
