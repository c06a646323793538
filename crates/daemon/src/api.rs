//! The control API: paths, what they take and what they answer.
//!
//! Owns the table of routes, which is the one that a test compares with the OpenAPI document, and the shape of errors:
//! `{"schema_version": 1, "error": "…"}`, whatever went wrong. Must not know who may ask (module `server`).

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post, put};
use axum::{Json, Router};
use futures_core::Stream;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use serve::{Command, Failure};
use tokio::sync::mpsc;

use crate::hub::Event;
use crate::jobs::{End, Job, JobView, Running};
use crate::pictures::{buckets, disk_trace, set_history, volume_history};
use crate::registry::{Registry, SetView};
use crate::settings::Of;
use crate::web;
use crate::worker::Order;

/// Most bytes of a request's body.
const BODY_BYTES: usize = 64 << 10;
/// Errors in `status`.
const LAST_ERRORS: usize = 10;

/// What the handlers share.
pub(crate) struct Api {
    pub(crate) registry: Arc<Registry>,
    pub(crate) config_path: PathBuf,
    pub(crate) began: Instant,
}

/// An answer that is none.
pub(crate) struct Refusal(StatusCode, String);

impl Refusal {
    /// The request makes no sense.
    pub(crate) fn malformed(why: String) -> Refusal {
        Refusal(StatusCode::BAD_REQUEST, why)
    }
}

impl From<Failure> for Refusal {
    fn from(failure: Failure) -> Refusal {
        let text = failure.message().unwrap_or("it found a problem").to_owned();
        match failure {
            Failure::Usage(_) => Refusal(StatusCode::BAD_REQUEST, text),
            _ => Refusal(StatusCode::CONFLICT, text),
        }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        (self.0, Json(json!({"schema_version": 1, "error": self.1}))).into_response()
    }
}

pub(crate) type Answered = Result<Json<Value>, Refusal>;
pub(crate) type Shared = State<Arc<Api>>;

pub(crate) fn not_found(failure: Failure) -> Refusal {
    Refusal(StatusCode::NOT_FOUND, failure.message().unwrap_or_default().to_owned())
}

fn parse<T: DeserializeOwned>(body: &Bytes) -> Result<T, Refusal> {
    let bytes: &[u8] = if body.is_empty() { b"{}" } else { body };
    serde_json::from_slice(bytes).map_err(|e| Refusal(StatusCode::BAD_REQUEST, format!("body: {e}")))
}

pub(crate) fn ok(mut value: Value) -> Answered {
    if let Some(map) = value.as_object_mut() {
        map.insert("schema_version".into(), 1.into());
    }
    Ok(Json(value))
}

/// What has begun is ended, also when the client goes away meanwhile.
async fn to_the_end<T: Send + 'static>(
    work: impl Future<Output = Result<T, Failure>> + Send + 'static,
) -> Result<T, Refusal> {
    match tokio::spawn(work).await {
        Ok(result) => Ok(result?),
        Err(e) => Err(Refusal(StatusCode::INTERNAL_SERVER_ERROR, format!("internal error: {e}"))),
    }
}

/// The table of routes, once for the router and once for the test that compares it with the document.
macro_rules! routes {
    ($($method:ident $path:literal => $handler:ident,)*) => {
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
    get "/v1/sets" => sets,
    get "/v1/sets/{set}" => one_set,
    get "/v1/sets/{set}/history" => set_history,
    get "/v1/sets/{set}/buckets" => buckets,
    post "/v1/sets/{set}/gc" => gc,
    post "/v1/sets/{set}/flush" => flush_set,
    post "/v1/sets/{set}/volumes" => create,
    get "/v1/sets/{set}/tunables" => set_tunables,
    get "/v1/sets/{set}/tunables/{key}" => set_tunable,
    put "/v1/sets/{set}/tunables/{key}" => change_set_tunable,
    delete "/v1/sets/{set}/tunables/{key}" => reset_set_tunable,
    get "/v1/volumes" => volumes,
    get "/v1/volumes/{volume}" => one_volume,
    post "/v1/volumes/{volume}/stop" => stop,
    post "/v1/volumes/{volume}/detach" => detach,
    post "/v1/volumes/{volume}/flush" => flush,
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
    post "/v1/register" => register,
    post "/v1/unregister" => unregister,
    post "/v1/attach" => attach,
    post "/v1/check" => check,
    post "/v1/reload" => reload,
    get "/v1/jobs" => jobs,
    get "/v1/jobs/{job}" => one_job,
    delete "/v1/jobs/{job}" => cancel_job,
    get "/v1/events" => events,
    get "/metrics" => metrics_text,
}

/// The service.
pub(crate) fn router(api: Arc<Api>) -> Router {
    let control = with_routes(Router::new()).layer(axum::middleware::from_fn(web::own_pages_only));
    web::with_files(control)
        .fallback(|| async {
            Refusal(StatusCode::NOT_FOUND, "there is no such path; see /v1/openapi.json".into())
        })
        .method_not_allowed_fallback(|| async {
            Refusal(
                StatusCode::METHOD_NOT_ALLOWED,
                "this path does not take this method; see /v1/openapi.json".into(),
            )
        })
        .layer(DefaultBodyLimit::max(BODY_BYTES))
        .layer(axum::middleware::map_response(errors_are_json))
        .with_state(api)
}

/// Refusals that come from below the handlers are plain text.
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
    Refusal(status, String::from_utf8_lossy(&text).into_owned()).into_response()
}

/// The document that describes all this.
pub(crate) const OPENAPI: &str = include_str!("openapi.json");

async fn openapi() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], OPENAPI).into_response()
}

// ---- looking ----

async fn all_devices(api: &Api, sets: &[SetView]) -> Value {
    let mut views = api.registry.device_views();
    for view in &mut views {
        // Attaching and detaching change what was seen when the device came.
        for set in sets {
            let volume =
                set.figures.volumes.iter().find(|v| v.backing_uuid == view.uuid && v.backing_uuid.is_some());
            if let Some(volume) = volume {
                view.set = volume.attached.then(|| set.id.clone());
                view.label.clone_from(&volume.label);
            }
        }
    }
    json!(views)
}

async fn status(State(api): Shared) -> Answered {
    let sets = api.registry.sets().await;
    let devices = all_devices(&api, &sets).await;
    let errors = api.registry.shared.hub.last(LAST_ERRORS, |e| e.level != "info");
    let jobs: Vec<_> = api.registry.jobs.all().into_iter().filter(JobView::is_running).collect();
    ok(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "pid": std::process::id(),
        "uptime_seconds": api.began.elapsed().as_secs(),
        "sets": sets,
        "devices": devices,
        "jobs": jobs,
        "last_errors": errors.iter().map(|e| json!(**e)).collect::<Vec<_>>(),
    }))
}

async fn sets(State(api): Shared) -> Answered {
    ok(json!({"sets": api.registry.sets().await}))
}

async fn one_set(State(api): Shared, Path(set): Path<String>) -> Answered {
    let id = api.registry.set_of(&set).map_err(not_found)?;
    let found = api.registry.sets().await.into_iter().find(|s| s.id == id);
    match found {
        Some(set) => ok(json!({"set": set})),
        None => Err(Refusal(StatusCode::NOT_FOUND, format!("there is no set {set}"))),
    }
}

async fn volumes(State(api): Shared) -> Answered {
    let mut volumes = Vec::new();
    for set in api.registry.sets().await {
        for volume in set.figures.volumes {
            let mut value = json!(volume);
            value["set"] = json!(volume.attached.then(|| set.id.clone()));
            volumes.push(value);
        }
    }
    ok(json!({"volumes": volumes}))
}

async fn one_volume(State(api): Shared, Path(volume): Path<String>) -> Answered {
    let (worker, name) = api.registry.find(&volume).await.map_err(not_found)?;
    let figures = api.registry.figures_of(&worker).await?;
    match figures.volumes.into_iter().find(|v| v.name == name) {
        Some(found) => {
            let mut value = json!(found);
            value["set"] = json!(found.attached.then(|| worker.plan.id.clone()));
            ok(json!({"volume": value}))
        }
        None => Err(Refusal(StatusCode::NOT_FOUND, format!("there is no volume {volume}"))),
    }
}

async fn devices(State(api): Shared) -> Answered {
    let sets = api.registry.sets().await;
    ok(json!({"devices": all_devices(&api, &sets).await}))
}

async fn explain(State(api): Shared, Path(volume): Path<String>) -> Answered {
    api.registry.find(&volume).await.map_err(not_found)?;
    let said = api.registry.explain(&volume).await?;
    ok(json!({"writeback": said.writeback, "bypassed": said.bypassed, "hits": said.hits}))
}

async fn metrics_text(State(api): Shared, headers: HeaderMap) -> Response {
    let accept = headers.get(header::ACCEPT).and_then(|a| a.to_str().ok()).unwrap_or("");
    let format = metrics::Format::accepted(accept);
    let text = metrics::render(&api.registry.engine_figures().await, format);
    ([(header::CONTENT_TYPE, format.content_type())], text).into_response()
}

// ---- devices ----

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Register {
    devices: Vec<PathBuf>,
    /// One that is registered already is no mistake.
    #[serde(default)]
    quiet: bool,
}

async fn register(State(api): Shared, body: Bytes) -> Answered {
    let wanted: Register = parse(&body)?;
    if let Some(relative) = wanted.devices.iter().find(|d| !d.is_absolute()) {
        let text = format!("{}: expected an absolute path", relative.display());
        return Err(Refusal(StatusCode::BAD_REQUEST, text));
    }
    let work = async move {
        match wanted.quiet {
            true => api.registry.register_quietly(wanted.devices).await,
            false => api.registry.register(wanted.devices).await,
        }
    };
    let registered = to_the_end(work).await?;
    ok(json!({"devices": registered}))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Unregister {
    device: String,
}

async fn unregister(State(api): Shared, body: Bytes) -> Answered {
    let wanted: Unregister = parse(&body)?;
    to_the_end(async move { api.registry.unregister(&wanted.device).await }).await?;
    ok(json!({}))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Attach {
    cache: String,
    backing: String,
}

async fn attach(State(api): Shared, body: Bytes) -> Answered {
    let wanted: Attach = parse(&body)?;
    to_the_end(async move { api.registry.attach(&wanted.cache, &wanted.backing).await }).await?;
    ok(json!({}))
}

async fn stop(State(api): Shared, Path(volume): Path<String>) -> Answered {
    api.registry.find(&volume).await.map_err(not_found)?;
    to_the_end(async move { api.registry.stop_volume(&volume).await }).await?;
    ok(json!({}))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Create {
    size_bytes: u64,
    #[serde(default)]
    label: String,
}

async fn create(State(api): Shared, Path(set): Path<String>, body: Bytes) -> Answered {
    let wanted: Create = parse(&body)?;
    if wanted.size_bytes == 0 || !wanted.size_bytes.is_multiple_of(512) {
        let text = format!("size_bytes: expected a multiple of 512, found {}", wanted.size_bytes);
        return Err(Refusal(StatusCode::BAD_REQUEST, text));
    }
    let sectors = wanted.size_bytes / 512;
    to_the_end(async move { api.registry.create(&set, sectors, wanted.label).await }).await?;
    ok(json!({}))
}

async fn reload(State(api): Shared) -> Answered {
    let changes = to_the_end(async move { api.registry.reload(&api.config_path).await }).await?;
    ok(json!({"changes": changes}))
}

// ---- tunables ----

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Put {
    value: String,
    #[serde(default)]
    runtime: bool,
}

/// Whose tunables, for work that goes on when its request is gone.
#[derive(Clone)]
enum Whose {
    Set(String),
    Volume(String),
}

impl Whose {
    fn of(&self) -> Of<'_> {
        match self {
            Whose::Set(name) => Of::Set(name),
            Whose::Volume(name) => Of::Volume(name),
        }
    }
}

async fn change(api: Arc<Api>, whose: Whose, key: String, put: Put) -> Answered {
    let work = async move { api.registry.set_tunable(whose.of(), &key, &put.value, !put.runtime).await };
    ok(json!({"changed": to_the_end(work).await?}))
}

async fn reset(api: Arc<Api>, whose: Whose, key: String) -> Answered {
    let work = async move { api.registry.reset_tunable(whose.of(), &key).await };
    ok(json!({"changed": to_the_end(work).await?}))
}

async fn set_tunables(State(api): Shared, Path(set): Path<String>) -> Answered {
    ok(json!({"tunables": api.registry.tunables(Of::Set(&set)).await?}))
}

async fn set_tunable(State(api): Shared, Path((set, key)): Path<(String, String)>) -> Answered {
    ok(json!({"tunable": api.registry.tunable(Of::Set(&set), &key).await?}))
}

async fn change_set_tunable(
    State(api): Shared,
    Path((set, key)): Path<(String, String)>,
    body: Bytes,
) -> Answered {
    change(api, Whose::Set(set), key, parse(&body)?).await
}

async fn reset_set_tunable(State(api): Shared, Path((set, key)): Path<(String, String)>) -> Answered {
    reset(api, Whose::Set(set), key).await
}

async fn volume_tunables(State(api): Shared, Path(volume): Path<String>) -> Answered {
    api.registry.find(&volume).await.map_err(not_found)?;
    ok(json!({"tunables": api.registry.tunables(Of::Volume(&volume)).await?}))
}

async fn volume_tunable(State(api): Shared, Path((volume, key)): Path<(String, String)>) -> Answered {
    api.registry.find(&volume).await.map_err(not_found)?;
    ok(json!({"tunable": api.registry.tunable(Of::Volume(&volume), &key).await?}))
}

async fn change_volume_tunable(
    State(api): Shared,
    Path((volume, key)): Path<(String, String)>,
    body: Bytes,
) -> Answered {
    let put = parse(&body)?;
    api.registry.find(&volume).await.map_err(not_found)?;
    change(api, Whose::Volume(volume), key, put).await
}

async fn reset_volume_tunable(State(api): Shared, Path((volume, key)): Path<(String, String)>) -> Answered {
    api.registry.find(&volume).await.map_err(not_found)?;
    reset(api, Whose::Volume(volume), key).await
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Mode {
    mode: String,
}

async fn cache_mode(State(api): Shared, Path(volume): Path<String>, body: Bytes) -> Answered {
    let Mode { mode } = parse(&body)?;
    api.registry.find(&volume).await.map_err(not_found)?;
    change(api, Whose::Volume(volume), "cache_mode".into(), Put { value: mode, runtime: false }).await
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Label {
    label: String,
}

async fn label(State(api): Shared, Path(volume): Path<String>, body: Bytes) -> Answered {
    let Label { label } = parse(&body)?;
    api.registry.find(&volume).await.map_err(not_found)?;
    change(api, Whose::Volume(volume), "label".into(), Put { value: label, runtime: false }).await
}

// ---- work ----

async fn gc(State(api): Shared, Path(set): Path<String>) -> Answered {
    let worker = api.registry.set(&set).map_err(not_found)?;
    to_the_end(async move { api.registry.command(&worker, Command::Gc).await }).await?;
    ok(json!({}))
}

fn accepted(job: &Job) -> Result<Response, Refusal> {
    let body = Json(json!({"schema_version": 1, "job": job.view()}));
    Ok((StatusCode::ACCEPTED, body).into_response())
}

async fn detach(State(api): Shared, Path(volume): Path<String>) -> Result<Response, Refusal> {
    let (worker, name) = api.registry.find(&volume).await.map_err(not_found)?;
    let job = api.registry.begin_job(&worker, "detach", &name, |job| Order::Detach(name.clone(), job))?;
    accepted(&job)
}

async fn flush(State(api): Shared, Path(volume): Path<String>) -> Result<Response, Refusal> {
    let (worker, name) = api.registry.find(&volume).await.map_err(not_found)?;
    let job = api.registry.begin_job(&worker, "flush", &name, |job| Order::Flush(Some(name.clone()), job))?;
    accepted(&job)
}

async fn flush_set(State(api): Shared, Path(set): Path<String>) -> Result<Response, Refusal> {
    let worker = api.registry.set(&set).map_err(not_found)?;
    let id = worker.plan.id.clone();
    let job = api.registry.begin_job(&worker, "flush", &id, |job| Order::Flush(None, job))?;
    accepted(&job)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Check {
    devices: Vec<String>,
    #[serde(default)]
    quick: bool,
    /// Also if somebody writes to them: what is found then may be torn.
    #[serde(default)]
    in_use: bool,
}

async fn check(State(api): Shared, body: Bytes) -> Result<Response, Refusal> {
    let wanted: Check = parse(&body)?;
    let paths = wanted.devices.iter().map(|d| api.registry.device_path(d));
    let paths = paths.collect::<Result<Vec<_>, Failure>>()?;
    let Some(job) = api.registry.jobs.begin("check", &wanted.devices.join(" ")) else {
        return Err(Refusal(StatusCode::CONFLICT, "too many jobs are running".into()));
    };
    let running = Running(job.clone());
    tokio::task::spawn_blocking(move || check_now(&paths, wanted.quick, wanted.in_use, &running));
    accepted(&job)
}

/// Verifies devices; those that somebody writes to only if that is wanted. On a thread of its own.
fn check_now(paths: &[PathBuf], quick: bool, in_use: bool, job: &Running) {
    let look = || -> Result<End, Failure> {
        let looker = serve::look::Looker::new(in_use, "\"in_use\": true")?;
        let devices = paths.iter().map(|p| looker.open(p)).collect::<Result<Vec<_>, _>>()?;
        let sources: Vec<&dyn inspect::ReadAt> = devices.iter().map(|d| &d.source as _).collect();
        let options = inspect::CheckOptions { compare_clean: !quick };
        let report = inspect::check(&sources, options, &mut |p| {
            job.0.progress(p.done.bytes(), p.total.bytes());
            if job.0.is_cancelled() {
                std::ops::ControlFlow::Break(())
            } else {
                std::ops::ControlFlow::Continue(())
            }
        });
        job.0.reports(json!(report));
        Ok(match (job.0.is_cancelled(), report.is_ok()) {
            (true, _) => End::Cancelled,
            (false, true) => End::Done,
            (false, false) => End::Failed("problems were found: see the report".into()),
        })
    };
    job.0.ended(look().unwrap_or_else(|e| End::Failed(e.message().unwrap_or_default().to_owned())));
}

async fn jobs(State(api): Shared) -> Answered {
    ok(json!({"jobs": api.registry.jobs.all()}))
}

fn job_of(api: &Api, id: &str) -> Result<Arc<Job>, Refusal> {
    let found = id.parse().ok().and_then(|id| api.registry.jobs.get(id));
    found.ok_or_else(|| Refusal(StatusCode::NOT_FOUND, format!("there is no job {id}")))
}

async fn one_job(State(api): Shared, Path(id): Path<String>) -> Answered {
    ok(json!({"job": job_of(&api, &id)?.view()}))
}

async fn cancel_job(State(api): Shared, Path(id): Path<String>) -> Answered {
    let job = job_of(&api, &id)?;
    job.cancel();
    ok(json!({"job": job.view()}))
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

async fn events(State(api): Shared) -> Result<Response, Refusal> {
    let Some(receiver) = api.registry.shared.hub.listen() else {
        return Err(Refusal(StatusCode::SERVICE_UNAVAILABLE, "too many clients listen to events".into()));
    };
    Ok(Sse::new(EventStream(receiver)).keep_alive(KeepAlive::default()).into_response())
}

#[cfg(test)]
mod tests {
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
