//! The shape of answers and of errors.
//!
//! Owns the version of the schema, and `{"schema_version": 1, "error": "…"}` for every error, with `instead` if the request
//! would be right with another name. Must not know the request or the client.

use axum::Json;
use axum::body::Bytes;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use serve::Failure;

use crate::expected::plain_words;
use crate::names::Unresolved;

/// An error as the answer to a request.
pub(crate) struct Refusal {
    pub(crate) status: StatusCode,
    pub(crate) text: String,
    /// What the request could have said.
    pub(crate) instead: Option<Box<Instead>>,
}

/// The words of a request that were wrong, and those that would be right, from which a client makes a command.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct Instead {
    /// The name in the request, and the names of which each would be right; none if the name is right.
    pub(crate) name: String,
    pub(crate) names: Vec<String>,
    /// The tunable in the request, and the one that is spelled nearly so; `None` if the tunable is right.
    pub(crate) key: Option<(String, String)>,
}

impl Refusal {
    pub(crate) fn new(status: StatusCode, text: String) -> Refusal {
        Refusal { status, text, instead: None }
    }

    /// A refusal of a malformed request, with status 400.
    pub(crate) fn malformed(why: String) -> Refusal {
        Refusal::new(StatusCode::BAD_REQUEST, why)
    }
}

impl From<Failure> for Refusal {
    fn from(failure: Failure) -> Refusal {
        let text =
            failure.message().unwrap_or("the command found a problem; see the messages before").to_owned();
        match failure {
            Failure::Usage(_) | Failure::BadValue { .. } => Refusal::new(StatusCode::BAD_REQUEST, text),
            _ => Refusal::new(StatusCode::CONFLICT, text),
        }
    }
}

impl From<Unresolved> for Refusal {
    fn from(unresolved: Unresolved) -> Refusal {
        let status = match unresolved {
            Unresolved::Malformed(_) => StatusCode::BAD_REQUEST,
            Unresolved::Unknown(_)
            | Unresolved::NoPath(_)
            | Unresolved::NotRegistered(_)
            | Unresolved::OtherKind { .. } => StatusCode::NOT_FOUND,
            Unresolved::Refused(_) => StatusCode::CONFLICT,
        };
        let instead = match &unresolved {
            // Without another name, a client would propose the request itself.
            Unresolved::OtherKind { name, names, .. } if !names.is_empty() => {
                Some(Box::new(Instead { name: name.clone(), names: names.clone(), key: None }))
            }
            _ => None,
        };
        let text = Failure::from(unresolved).message().unwrap_or_default().to_owned();
        Refusal { status, text, instead }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let Json(mut body) = words(&self.text);
        if let Some(instead) = &self.instead {
            body["instead"] = json!(instead);
        }
        let mut response = (self.status, Json(body)).into_response();
        response.extensions_mut().insert(Why(self.text));
        response
    }
}

/// The reason of a refusal, as an extension of its response, for the audit.
#[derive(Clone)]
pub(crate) struct Why(pub(crate) String);

pub(crate) type Answered = Result<Json<Value>, Refusal>;

pub(crate) fn parse<T: DeserializeOwned>(body: &Bytes) -> Result<T, Refusal> {
    let bytes: &[u8] = if body.is_empty() { b"{}" } else { body };
    serde_json::from_slice(bytes)
        .map_err(|e| Refusal::new(StatusCode::BAD_REQUEST, format!("body: {}", plain_words(&e.to_string()))))
}

pub(crate) fn ok(mut value: Value) -> Answered {
    if let Some(map) = value.as_object_mut() {
        map.insert("schema_version".into(), 1.into());
    }
    Ok(Json(value))
}

/// Runs a handler to its end, even if the client disconnects meanwhile.
pub(crate) async fn to_the_end<T: Send + 'static>(
    work: impl Future<Output = Result<T, Failure>> + Send + 'static,
) -> Result<T, Refusal> {
    match tokio::spawn(work).await {
        Ok(result) => Ok(result?),
        Err(e) => Err(Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, format!("internal error: {e}"))),
    }
}

/// The answer to a request whose handler panicked or was cancelled.
pub(crate) fn internal_error(e: &tokio::task::JoinError) -> Response {
    (StatusCode::INTERNAL_SERVER_ERROR, words(&format!("internal error: {e}"))).into_response()
}

/// The body of an error.
pub(crate) fn words(why: &str) -> Json<serde_json::Value> {
    Json(json!({"schema_version": 1, "error": why}))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// `drain` of a set that serves no volume proposed the same `drain`.
    #[test]
    fn a_refusal_without_another_name_proposes_nothing() {
        let refusal = |names: &[&str]| {
            let names = names.iter().map(|name| (*name).to_owned()).collect();
            Refusal::from(Unresolved::OtherKind { why: "a set".into(), name: "fast".into(), names })
        };
        assert_eq!(refusal(&["one"]).instead.unwrap().names, ["one"]);
        assert_eq!(refusal(&[]).instead, None);
        assert_eq!(refusal(&[]).status, StatusCode::NOT_FOUND);
    }

    /// The description of the API had no `instead`.
    #[test]
    fn the_document_has_the_fields_of_a_refusal() {
        let document: Value = serde_json::from_str(crate::api::OPENAPI).unwrap();
        let error = &document["components"]["schemas"]["Error"]["properties"];
        let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<BTreeSet<_>>();
        assert_eq!(keys(error).into_iter().collect::<Vec<_>>(), ["error", "instead", "schema_version"]);
        let instead = Instead { name: "a".into(), names: vec!["b".into()], key: None };
        assert_eq!(keys(&error["instead"]["properties"]), keys(&json!(instead)));
    }
}
