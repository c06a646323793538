//! The control API: its paths, their parameters and their answers.
//!
//! Owns the table of routes, which a test compares with the OpenAPI document, and the answer of each route. Must not know
//! which clients may ask (module `server`), nor the shape of errors (module `answer`).

mod begin;
mod change;
mod checksums;
mod context;
mod flash;
mod group;
mod make;
mod pictures;
mod tunables;

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::Router;
use axum::extract::{DefaultBodyLimit, Path, RawQuery, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post, put};
use futures_core::Stream;
use serde_json::json;
use tokio::sync::mpsc;

use crate::answer::{Answered, Refusal, ok};
use crate::audit;
use crate::components::Found;
use crate::hub::Event;
use crate::jobs::JobView;
use crate::{wall_clock, web};

pub(crate) use context::Api;

use context::SharedApi;
use pictures::{buckets, disk_trace, host_history, latencies, set_history, volume_history};

use change::{
    attach, cancel_job, check, detach, drain, drain_set, jobs, one_job, register, reload, stop, unregister,
    wipe,
};
use checksums::{scrub, set_damaged, set_decide, volume_damaged, volume_decide};
use flash::{create, delete_volume, gc};
use group::{Add, Remove, Replace, change_group};
use make::make;
use tunables::{
    cache_mode, change_set_tunable, change_volume_tunable, label, reset_set_tunable, reset_volume_tunable,
    set_label, set_tunable, set_tunables, volume_tunable, volume_tunables,
};

/// Limit of the bytes of a request's body.
const BODY_BYTES: usize = 64 << 10;
/// Number of errors in `status`.
const LAST_ERRORS: usize = 10;

/// The table of routes, once for the router and once for the test that compares it with the document.
macro_rules! routes {
    ($($method:ident $path:literal => $handler:expr,)*) => {
        fn with_routes(router: Router<Arc<Api>>) -> Router<Arc<Api>> {
            router$(.route($path, $method($handler)))*
        }

        #[cfg(test)]
        const ROUTES: &[(&str, &str)] = &[$((stringify!($method), $path)),*];
    };
}

routes! {
    get "/v1/openapi.json" => openapi,
    get "/v1/status" => status,
    get "/v1/history" => host_history,
    get "/v1/latencies" => latencies,
    get "/v1/sets" => sets,
    get "/v1/sets/{set}" => one_set,
    get "/v1/sets/{set}/history" => set_history,
    get "/v1/sets/{set}/buckets" => buckets,
    post "/v1/sets/{set}/gc" => gc,
    post "/v1/sets/{set}/drain" => drain_set,
    post "/v1/sets/{set}/flush" => drain_set,
    post "/v1/sets/{set}/wipe" => wipe,
    post "/v1/sets/{set}/scrub" => scrub,
    post "/v1/sets/{set}/group/add" => change_group::<Add>,
    post "/v1/sets/{set}/group/remove" => change_group::<Remove>,
    post "/v1/sets/{set}/group/replace" => change_group::<Replace>,
    get "/v1/sets/{set}/damaged" => set_damaged,
    post "/v1/sets/{set}/damaged" => set_decide,
    post "/v1/sets/{set}/volumes" => create,
    put "/v1/sets/{set}/label" => set_label,
    get "/v1/sets/{set}/tunables" => set_tunables,
    get "/v1/sets/{set}/tunables/{key}" => set_tunable,
    put "/v1/sets/{set}/tunables/{key}" => change_set_tunable,
    delete "/v1/sets/{set}/tunables/{key}" => reset_set_tunable,
    get "/v1/volumes" => volumes,
    get "/v1/volumes/{volume}" => one_volume,
    get "/v1/volumes/{volume}/damaged" => volume_damaged,
    post "/v1/volumes/{volume}/damaged" => volume_decide,
    post "/v1/volumes/{volume}/stop" => stop,
    post "/v1/volumes/{volume}/delete" => delete_volume,
    post "/v1/volumes/{volume}/detach" => detach,
    post "/v1/volumes/{volume}/drain" => drain,
    post "/v1/volumes/{volume}/flush" => drain,
    put "/v1/volumes/{volume}/cache-mode" => cache_mode,
    put "/v1/volumes/{volume}/label" => label,
    get "/v1/volumes/{volume}/tunables" => volume_tunables,
    get "/v1/volumes/{volume}/tunables/{key}" => volume_tunable,
    put "/v1/volumes/{volume}/tunables/{key}" => change_volume_tunable,
    delete "/v1/volumes/{volume}/tunables/{key}" => reset_volume_tunable,
    get "/v1/volumes/{volume}/explain" => explain,
    get "/v1/volumes/{volume}/history" => volume_history,
    get "/v1/volumes/{volume}/disk-trace" => disk_trace,
    get "/v1/devices" => devices,
    get "/v1/names/{name}" => name,
    post "/v1/register" => register,
    post "/v1/unregister" => unregister,
    post "/v1/attach" => attach,
    post "/v1/check" => check,
    post "/v1/make" => make,
    post "/v1/reload" => reload,
    get "/v1/jobs" => jobs,
    get "/v1/jobs/{job}" => one_job,
    delete "/v1/jobs/{job}" => cancel_job,
    get "/v1/events" => events,
    get "/v1/events/history" => past_events,
    get "/metrics" => metrics_text,
}

/// Makes the service with all routes, and with errors as JSON.
pub(crate) fn router(api: Arc<Api>) -> Router {
    let control = with_routes(Router::new()).layer(axum::middleware::from_fn(web::own_pages_only));
    web::with_files(control)
        .fallback(|| async {
            Refusal::new(StatusCode::NOT_FOUND, "there is no such path; see /v1/openapi.json".into())
        })
        .method_not_allowed_fallback(|| async {
            Refusal::new(
                StatusCode::METHOD_NOT_ALLOWED,
                "this path does not support this method; see /v1/openapi.json".into(),
            )
        })
        .layer(axum::middleware::from_fn_with_state(api.clone(), begin::may_begin))
        .layer(DefaultBodyLimit::max(BODY_BYTES))
        .layer(axum::middleware::map_response(errors_are_json))
        .layer(axum::middleware::from_fn_with_state(api.registry.shared.hub.clone(), audit::log_changes))
        .with_state(api)
}

/// Turns the plain-text errors of the router and middleware into JSON.
async fn errors_are_json(response: Response) -> Response {
    let is_json = response
        .headers()
        .get(header::CONTENT_TYPE)
        .is_some_and(|t| t.as_bytes().starts_with(b"application/json"));
    if is_json || !(response.status().is_client_error() || response.status().is_server_error()) {
        return response;
    }
    let status = response.status();
    let text = axum::body::to_bytes(response.into_body(), BODY_BYTES).await.unwrap_or_default();
    Refusal::new(status, String::from_utf8_lossy(&text).into_owned()).into_response()
}

/// The OpenAPI document of the control API.
pub(crate) const OPENAPI: &str = include_str!("openapi.json");

async fn openapi() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], OPENAPI).into_response()
}

// ---- status ----

/// The name of this host; empty if the kernel does not tell it.
fn hostname() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned()
}

async fn status(State(api): SharedApi) -> Answered {
    let sets = api.registry.views.sets().await;
    let devices = api.registry.views.devices_with_growth(&sets).await;
    let errors = api.registry.shared.hub.last(LAST_ERRORS, |e| e.level != "info");
    let jobs: Vec<_> = api.registry.jobs.all().into_iter().filter(JobView::is_running).collect();
    let commands = api.registry.registration.under_way();
    let found = api.registry.overview.problems(&sets, &devices).await;
    ok(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "hostname": hostname(),
        "pid": std::process::id(),
        "uptime_seconds": api.began.elapsed().as_secs(),
        "problems": found,
        "sets": sets,
        "devices": devices,
        "jobs": jobs,
        "commands": commands,
        "last_errors": errors.iter().map(|e| json!(**e)).collect::<Vec<_>>(),
    }))
}

async fn sets(State(api): SharedApi) -> Answered {
    ok(json!({"sets": api.registry.views.sets().await}))
}

async fn one_set(State(api): SharedApi, Path(set): Path<String>) -> Answered {
    let id = api.registry.lookup.set_of(&set).await?;
    let found = api.registry.views.sets().await.into_iter().find(|s| s.id == id);
    match found {
        Some(set) => ok(json!({"set": set})),
        None => Err(Refusal::new(StatusCode::NOT_FOUND, format!("there is no set {set}"))),
    }
}

async fn volumes(State(api): SharedApi) -> Answered {
    let mut volumes = Vec::new();
    for set in api.registry.views.sets().await {
        for volume in set.figures.volumes {
            let mut value = json!(volume);
            value["set"] = json!(volume.attached.then(|| set.id.clone()));
            volumes.push(value);
        }
    }
    ok(json!({"volumes": volumes}))
}

async fn one_volume(State(api): SharedApi, Path(volume): Path<String>) -> Answered {
    let Found { worker, name, .. } = api.registry.lookup.find(&volume).await?;
    let figures = worker.snapshot().await?;
    match figures.volumes.into_iter().find(|v| v.name == name) {
        Some(found) => {
            let mut value = json!(found);
            value["set"] = json!(found.attached.then(|| worker.plan.id.clone()));
            ok(json!({"volume": value}))
        }
        None => Err(Refusal::new(StatusCode::NOT_FOUND, format!("there is no volume {volume}"))),
    }
}

/// Answers what a name resolves to.
async fn name(State(api): SharedApi, Path(name): Path<String>) -> Answered {
    ok(json!({"resolved": api.registry.lookup.named(&name).await?}))
}

async fn devices(State(api): SharedApi) -> Answered {
    let sets = api.registry.views.sets().await;
    ok(json!({"devices": api.registry.views.devices_with_growth(&sets).await}))
}

async fn explain(State(api): SharedApi, Path(volume): Path<String>) -> Answered {
    let Found { worker, name, .. } = api.registry.lookup.find(&volume).await?;
    let figures = worker.figures().await?;
    let of_set =
        figures.sets.iter().find_map(|s| Some((s.volumes.iter().find(|v| v.name == name)?, Some(s))));
    let alone = || figures.alone.iter().find(|v| v.name == name).map(|v| (v, None));
    let Some((found, set)) = of_set.or_else(alone) else {
        return Err(Refusal::new(StatusCode::CONFLICT, format!("there is no volume {name}")));
    };
    let mut said = metrics::explain(found, set);
    for silent in api.registry.overview.silences.all() {
        if silent.thread == worker.plan.id && silent.volume.as_ref().is_none_or(|of| *of == name) {
            said = said.waiting_for(&silent.device, silent.requests, silent.seconds);
        }
    }
    ok(json!({"writeback": said.writeback, "bypassed": said.bypassed, "hits": said.hits}))
}

async fn metrics_text(State(api): SharedApi, headers: HeaderMap) -> Response {
    let accept = headers.get(header::ACCEPT).and_then(|a| a.to_str().ok()).unwrap_or("");
    let format = metrics::Format::accepted(accept);
    let text = metrics::render(&api.registry.scrape.figures().await, format);
    ([(header::CONTENT_TYPE, format.content_type())], text).into_response()
}

// ---- events ----

struct EventStream(mpsc::Receiver<Arc<Event>>);

impl Stream for EventStream {
    type Item = Result<SseEvent, std::convert::Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(cx).map(|event| {
            event.map(|event| {
                let data = serde_json::to_string(&*event).unwrap_or_default();
                Ok(SseEvent::default().id(event.seq.to_string()).event(event.kind).data(data))
            })
        })
    }
}

async fn events(State(api): SharedApi) -> Result<Response, Refusal> {
    let Some(receiver) = api.registry.shared.hub.listen() else {
        return Err(Refusal::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "too many clients listen to events".into(),
        ));
    };
    Ok(Sse::new(EventStream(receiver)).keep_alive(KeepAlive::default()).into_response())
}

/// The query of the history of events: from which time on.
fn since_ms(query: Option<&str>) -> Result<u64, Refusal> {
    let Some(query) = query.filter(|q| !q.is_empty()) else { return Ok(0) };
    let number = |text: &str| text.parse::<u64>().ok();
    let moment = query.strip_prefix("since_ms=").and_then(number);
    // The clock of the client may be another one.
    let span = || {
        query.strip_prefix("within_ms=").and_then(number).map(|ms| wall_clock::now_ms().saturating_sub(ms))
    };
    moment.or_else(span).ok_or_else(|| {
        Refusal::malformed(format!("query: expected since_ms=NUMBER or within_ms=NUMBER, found {query}"))
    })
}

async fn past_events(State(api): SharedApi, RawQuery(query): RawQuery) -> Answered {
    let since = since_ms(query.as_deref())?;
    let hub = api.registry.shared.hub.clone();
    let events = tokio::task::spawn_blocking(move || hub.since(since)).await;
    let events = events.map_err(|e| {
        Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, format!("events cannot be read: {e}"))
    })?;
    ok(json!({"events": events}))
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn the_document_has_exactly_these_routes() {
        let document: Value = serde_json::from_str(OPENAPI).unwrap();
        let mut described = Vec::new();
        for (path, item) in document["paths"].as_object().unwrap() {
            for (method, operation) in item.as_object().unwrap().iter().filter(|(k, _)| *k != "parameters") {
                assert!(operation["summary"].is_string(), "{method} {path}: what it does");
                assert!(operation["responses"].as_object().is_some_and(|r| !r.is_empty()), "{method} {path}");
                let wanted: Vec<&str> = path.split(['{', '}']).skip(1).step_by(2).collect();
                let given: Vec<&str> = item["parameters"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .map(|p| p["name"].as_str().unwrap())
                    .collect();
                assert_eq!(wanted, given, "{path}: parameters");
                described.push(format!("{method} {path}"));
            }
        }
        let mut there: Vec<String> = ROUTES.iter().map(|(method, path)| format!("{method} {path}")).collect();
        there.sort();
        described.sort();
        assert_eq!(there, described);
    }
}
