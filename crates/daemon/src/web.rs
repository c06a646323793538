//! The dashboard: its files, and the check of requests from browsers.
//!
//! Owns what is served below `/` and `/assets/`: files that are part of the program, with their types, an `ETag` each, and
//! a policy that permits the page its own origin only. The files have no data of the host, so they need no permission. The
//! data comes from the control API. Must not know the contents of that API.
//!
//! Any page on the web can make a browser send requests with the rights of its user. Therefore a request that a browser
//! sends for a page of another origin is refused. A request for a host name other than localhost is refused unless it has
//! the token: an attacker can make a DNS name resolve to this host.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::LazyLock;

use axum::extract::{Path, Request};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde_json::json;

/// A file of the dashboard.
struct Asset {
    name: &'static str,
    kind: &'static str,
    text: &'static str,
    tag: String,
}

const HTML: &str = "text/html; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const PICTURE: &str = "image/svg+xml";

macro_rules! assets {
    ($($name:literal: $kind:ident,)*) => {
        &[$(($name, $kind, include_str!(concat!("../web/", $name)))),*]
    };
}

/// Name, type and contents of every file.
const FILES: &[(&str, &str, &str)] = assets! {
    "index.html": HTML,
    "style.css": STYLE,
    "app.js": SCRIPT,
    "actions.js": SCRIPT,
    "api.js": SCRIPT,
    "changes.js": SCRIPT,
    "charts.js": SCRIPT,
    "dialog.js": SCRIPT,
    "format.js": SCRIPT,
    "groups.js": SCRIPT,
    "make.js": SCRIPT,
    "names.js": SCRIPT,
    "overview.js": SCRIPT,
    "parts.js": SCRIPT,
    "pictures.js": SCRIPT,
    "problems.js": SCRIPT,
    "scrub.js": SCRIPT,
    "sets.js": SCRIPT,
    "tunables.js": SCRIPT,
    "views.js": SCRIPT,
    "icon.svg": PICTURE,
    "vendor/uplot/uPlot.iife.min.js": SCRIPT,
    "vendor/uplot/uPlot.min.css": STYLE,
};

static ASSETS: LazyLock<Vec<Asset>> = LazyLock::new(|| {
    let with_tag = |&(name, kind, text): &(&'static str, &'static str, &'static str)| {
        let mut hasher = DefaultHasher::new();
        text.hash(&mut hasher);
        Asset { name, kind, text, tag: format!("\"{:016x}\"", hasher.finish()) }
    };
    FILES.iter().map(with_tag).collect()
});

/// The policy of the page: it may load its own files, and send requests to its own origin.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Adds the dashboard's files to a service.
pub(crate) fn with_files<S: Clone + Send + Sync + 'static>(router: Router<S>) -> Router<S> {
    let index = |headers: HeaderMap| async move { file("index.html", &headers) };
    let asset = |Path(name): Path<String>, headers: HeaderMap| async move { file(&name, &headers) };
    router.route("/", get(index)).route("/assets/{*name}", get(asset))
}

fn file(name: &str, headers: &HeaderMap) -> Response {
    let Some(asset) = ASSETS.iter().find(|a| a.name == name) else {
        return refuse(StatusCode::NOT_FOUND, &format!("the dashboard has no file {name}"));
    };
    let known = headers.get(header::IF_NONE_MATCH).and_then(|tags| tags.to_str().ok()).unwrap_or("");
    let same = known.split(',').any(|tag| tag.trim().trim_start_matches("W/") == asset.tag);
    let common = [
        (header::ETAG, asset.tag.as_str()),
        // The browser asks for the file each time: after an update the old page must not use the API of the new daemon.
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CONTENT_TYPE, asset.kind),
    ];
    if same {
        (StatusCode::NOT_MODIFIED, common).into_response()
    } else {
        (common, asset.text).into_response()
    }
}

fn refuse(status: StatusCode, why: &str) -> Response {
    (status, Json(json!({"schema_version": 1, "error": why}))).into_response()
}

/// Removes tokens from the requests of clients that are identified by other means, so the tokens give no rights.
pub(crate) fn without_tokens(router: Router) -> Router {
    router.layer(axum::middleware::map_request(forget_token))
}

async fn forget_token(mut request: Request) -> Request {
    request.headers_mut().remove(header::AUTHORIZATION);
    request
}

/// Marks a request that has shown the token, or that asks for data that every client may have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Meant;

/// Refuses requests that a browser sends for a page of another origin.
pub(crate) async fn own_pages_only(request: Request, next: Next) -> Response {
    if request.extensions().get::<Meant>().is_some() {
        return next.run(request).await;
    }
    match foreign(request.headers()) {
        Some(why) => refuse(StatusCode::FORBIDDEN, why),
        None => next.run(request).await,
    }
}

fn text(headers: &HeaderMap, name: impl header::AsHeaderName) -> Option<&str> {
    headers.get(name).and_then(|v: &HeaderValue| v.to_str().ok())
}

/// Why a request is refused; `None` if it is permitted. A token that is still in the headers has been checked before.
fn foreign(headers: &HeaderMap) -> Option<&'static str> {
    let (site, origin) = (text(headers, "sec-fetch-site"), text(headers, header::ORIGIN));
    // Programs other than browsers send none of these headers. A browser does not always send all of them.
    let agent = text(headers, header::USER_AGENT).unwrap_or("");
    if site.is_none() && origin.is_none() && !agent.starts_with("Mozilla/") {
        return None;
    }
    let host = text(headers, header::HOST).unwrap_or("");
    let own_origin = origin.is_none_or(|o| o.split_once("://").is_some_and(|(_, place)| place == host));
    if !own_origin || !site.is_none_or(|s| s == "same-origin" || s == "none") {
        return Some("request refused: it comes from a page of another origin");
    }
    if !headers.contains_key(header::AUTHORIZATION) && !is_local(host) {
        return Some(
            "request refused: without a token, expected the host name localhost in the address; use localhost \
             or a token",
        );
    }
    None
}

/// Whether a `Host` header names this host and nothing else.
fn is_local(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or(""),
        None => host.split(':').next().unwrap_or(""),
    };
    name == "localhost"
        || name.ends_with(".localhost")
        || name.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs.iter().map(|(n, v)| (n.parse().unwrap(), v.parse().unwrap())).collect()
    }

    #[test]
    fn pages_of_others_are_refused() {
        let local = ("host", "127.0.0.1:8080");
        for (allowed, pairs) in [
            (true, &[][..]),
            (true, &[("host", "anything")]),
            (true, &[local, ("sec-fetch-site", "same-origin")]),
            (true, &[local, ("sec-fetch-site", "same-origin"), ("origin", "http://127.0.0.1:8080")]),
            (true, &[local, ("sec-fetch-site", "none"), ("sec-fetch-mode", "navigate")]),
            (true, &[local, ("user-agent", "Mozilla/5.0")]),
            (true, &[("host", "nas.lan"), ("user-agent", "curl/8")]),
            (true, &[("host", "[::1]:80"), ("sec-fetch-site", "same-origin")]),
            (true, &[("host", "localhost"), ("origin", "http://localhost")]),
            (false, &[local, ("sec-fetch-site", "cross-site")]),
            (false, &[local, ("sec-fetch-site", "same-site")]),
            (false, &[local, ("origin", "http://127.0.0.1:8081")]),
            (false, &[local, ("origin", "null")]),
            (false, &[local, ("sec-fetch-site", "cross-site"), ("authorization", "Bearer x")]),
            (false, &[("host", "evil.example"), ("sec-fetch-site", "same-origin")]),
            (false, &[("host", "127.0.0.1.evil.example"), ("sec-fetch-site", "same-origin")]),
            (false, &[("sec-fetch-site", "same-origin")]),
            (false, &[("host", "evil.example"), ("user-agent", "Mozilla/5.0")]),
            (false, &[local, ("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate")]),
            // A form on another page.
            (false, &[local, ("origin", "http://evil.example"), ("sec-fetch-mode", "navigate")]),
            (true, &[("host", "nas.lan"), ("sec-fetch-site", "same-origin"), ("authorization", "Bearer x")]),
        ] {
            let why = foreign(&headers(pairs));
            assert_eq!(why.is_none(), allowed, "{pairs:?}: {why:?}");
        }
    }

    #[test]
    fn every_file_is_named_by_the_page_or_by_a_script_and_nothing_is_foreign() {
        let all: String = FILES.iter().map(|(.., text)| *text).collect();
        for (name, ..) in FILES.iter().filter(|(name, ..)| *name != "index.html") {
            let last = name.rsplit('/').next().unwrap();
            assert!(all.contains(last), "{name} is not used");
        }
        for (name, _, text) in FILES.iter().filter(|(name, ..)| !name.starts_with("vendor/")) {
            let rest = text.replace("http://www.w3.org/2000/svg", "");
            assert!(!rest.contains("http://") && !rest.contains("https://"), "{name} names another place");
            assert!(!rest.contains("innerHTML"), "{name} makes elements of text");
        }
    }

    #[test]
    fn files_of_a_browser_are_not_sent_again() {
        let first = file("app.js", &HeaderMap::new());
        assert_eq!(first.status(), StatusCode::OK);
        let tag = first.headers()[header::ETAG].to_str().unwrap().to_owned();
        assert_eq!(first.headers()[header::CONTENT_TYPE], SCRIPT);
        assert!(first.headers().contains_key(header::CONTENT_SECURITY_POLICY));
        let again = file("app.js", &headers(&[("if-none-match", &format!("\"x\", W/{tag}"))]));
        assert_eq!(again.status(), StatusCode::NOT_MODIFIED);
        assert_eq!(file("style.css", &headers(&[("if-none-match", &tag)])).status(), StatusCode::OK);
        assert_eq!(file("none.js", &HeaderMap::new()).status(), StatusCode::NOT_FOUND);
    }
}
