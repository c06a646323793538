// The control API from a browser: requests with the token, and events as they happen. Knows nothing of what is shown.

const KEY = "ubcache-token";

/** Takes the token out of the address (`#token=…`) into this tab's own storage. */
export function takeToken() {
  const given = /^#(.*&)?token=([^&]*)/.exec(location.hash);
  if (!given) return;
  setToken(decodeURIComponent(given[2]));
  history.replaceState(null, "", `${location.pathname}${location.search}#/`);
}

export function setToken(token) {
  if (token) sessionStorage.setItem(KEY, token);
  else sessionStorage.removeItem(KEY);
}

function headers(more = {}) {
  const token = sessionStorage.getItem(KEY);
  return token ? { ...more, Authorization: `Bearer ${token}` } : more;
}

/** What went wrong, in words of the daemon. `status` is 0 if there was no answer. */
export class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

async function ask(method, path, body) {
  let answer;
  try {
    answer = await fetch(path, {
      method,
      headers: headers(body === undefined ? {} : { "Content-Type": "application/json" }),
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
    });
  } catch {
    throw new Refused(0, "the daemon does not answer");
  }
  const value = await answer.json().catch(() => null);
  if (!answer.ok || value === null) throw new Refused(answer.status, value?.error ?? `unexpected answer (${answer.status})`);
  return value;
}

export const get = (path) => ask("GET", path);
export const put = (path, body) => ask("PUT", path, body);
export const post = (path, body = {}) => ask("POST", path, body);
export const remove = (path) => ask("DELETE", path);

const pause = (ms) => new Promise((done) => setTimeout(done, ms));

/** Shows every event to `see`, for as long as the page is looked at. Begins anew by itself. */
export async function listen(see) {
  for (;;) {
    if (document.hidden) {
      await new Promise((shown) => document.addEventListener("visibilitychange", shown, { once: true }));
      continue;
    }
    const end = new AbortController();
    const hide = () => document.hidden && end.abort();
    document.addEventListener("visibilitychange", hide);
    try {
      const answer = await fetch("v1/events", { headers: headers(), cache: "no-store", signal: end.signal });
      if (answer.ok) await readEvents(answer.body.pipeThrough(new TextDecoderStream()).getReader(), see);
    } catch {
      // It is tried again; that there is no connection is said by the requests.
    }
    document.removeEventListener("visibilitychange", hide);
    await pause(2000);
  }
}

/** Server-sent events: blocks of lines with an empty line behind each. */
async function readEvents(reader, see) {
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    const blocks = text.split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data:"));
      if (data.length) see(JSON.parse(data.map((line) => line.slice(5)).join("\n")));
    }
  }
}
