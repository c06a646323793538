// Tests the dashboard in a browser: the drawings, changes of settings, the size of a phone, and that it contacts no other host.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import fs from "node:fs";
import os from "node:os";
import path from "node:path";
import { after, before, test } from "node:test";

import { DESKTOP, FILES, PHONE, chart, drawn, fitsThePhone, focused, isAccessible, launch, open as openPage } from "./page.mjs";
import { World, until } from "./world.mjs";

/** Seconds of requests before the first check, so that the charts have lines. */
const SECONDS = Number(process.env.UBCACHE_DASHBOARD_SECONDS ?? 25);

let world;
let browser;
let stopWork;

before(async () => {
  world = await World.start();
  stopWork = world.work();
  browser = await launch();
});

after(async () => {
  await stopWork?.();
  await browser?.close();
  await world?.end();
});

const open = (where, { origin = world.origin, ...more } = {}) => openPage(browser, origin, where, more);

const volumePage = (label) => `#/volume/${world.volumes[label]}`;
const setPage = () => `#/set/${world.set}`;

/** Shows a tunable: its group is folded until it is searched for. */
const find = (page, key) => page.getByLabel("Find a tunable").fill(key);

const now = async (label) => (await world.ask("GET", `/v1/volumes/${world.volumes[label]}`)).volume;
const value = async (label, key) => (await world.ask("GET", `/v1/volumes/${world.volumes[label]}/tunables/${key}`)).tunable.value;

test("the overview shows every set and volume", async () => {
  const { page, shoot, done } = await open("");
  const set = page.getByRole("region", { name: "Cache nvme" });
  for (const label of ["archive", "mail"]) await set.getByRole("link", { name: new RegExp(label) }).waitFor();
  await page.getByRole("region", { name: "Served without a cache" }).getByRole("link", { name: /spare/ }).waitFor();
  await set.getByRole("row", { name: /archive.*dirty.*writeback.*\d\/s/ }).waitFor();
  const dirty = await set.getByText(/dirty and .* clean data of/).textContent();
  assert.match(dirty, /\d MiB|\d KiB/);
  const short = page.getByRole("region", { name: "In short" });
  await short.getByText(/\d\/s/).waitFor();
  await until("latencies", async () => ((await short.textContent()).match(/p99\d[\d.]* (µs|ms|s)/g) ?? []).length === 2);
  await set.getByRole("row", { name: /archive.* \d[\d.]* (µs|ms|s) \d[\d.]* (µs|ms|s) / }).waitFor();
  await drawn(page, "Requests", ["read", "write"]);
  await drawn(page, "Latency", ["read", "write"]);
  await drawn(page, "Hit ratio", ["writeback"]);
  // The host has its name, and nothing is wrong: no state that is normal looks like a warning.
  await page.getByRole("heading", { level: 1, name: os.hostname() }).waitFor();
  assert.equal(await page.title(), os.hostname());
  await page.getByRole("banner").getByText("No problems").waitFor();
  assert.equal(await page.locator(".chip.warn, .chip.bad, .dot.warn, .dot.bad").count(), 0);
  await isAccessible(page, "overview");
  await shoot("overview-desktop-light");
  // By keyboard: the first link skips the navigation.
  await page.keyboard.press("Tab");
  assert.equal(await page.evaluate(() => document.activeElement.textContent), "Skip to the content");
  await page.keyboard.press("Enter");
  assert.equal(await page.evaluate(() => document.activeElement.id), "main");
  assert.ok(await set.isVisible(), "the view stays");
  await page.getByRole("navigation").getByRole("link", { name: /archive/ }).click();
  await page.getByRole("heading", { name: /archive/, level: 1 }).waitFor();
  await done();
});

test("charts of a volume draw what happens", async () => {
  const { page, shoot, done } = await open(volumePage("archive"));
  await page.getByRole("button", { name: "1 min" }).click();
  // The history from before the page was opened is there at once.
  const history = await world.ask("GET", `/v1/volumes/${world.volumes.archive}/history`);
  assert.ok(history.columns.reads.some((n) => n > 50), "requests are counted");
  await until("samples", async () => (await world.ask("GET", `/v1/volumes/${world.volumes.archive}/history`)).columns.time_ms.length >= SECONDS);
  await drawn(page, "Requests", ["read", "write"]);
  await drawn(page, "Throughput", ["read", "write"]);
  await drawn(page, "Latency of reads", ["p50", "p99"]);
  await drawn(page, "Latency of writes", ["p50", "p99"]);
  await drawn(page, "Hit ratio", ["writeback"]);
  await drawn(page, "Misses and bypassed requests", ["miss"]);
  await drawn(page, "Dirty data and its target", ["dirty", "target"]);
  await drawn(page, "Writeback rate and its terms", ["writeback"]);
  await drawn(page, "What reaches the backing device", ["read", "writeback"]);
  const why = page.getByRole("region", { name: "Explanation" });
  await why.getByText(/dirty|written back/).first().waitFor();
  // The figure in the page is the daemon's.
  const size = (await now("archive")).size_bytes;
  assert.ok(size > 1e9 && (await page.getByRole("region", { name: "Facts" }).textContent()).includes("1 GiB"));
  await isAccessible(page, "volume");
  await shoot("volume-desktop-light");
  await page.getByLabel("zoom to the requests").check();
  await shoot("volume-desktop-zoomed");
  await done();
});

test("rare peaks leave the scale, are named, and are shown on demand", async () => {
  const { page, done } = await open("");
  const scales = await page.evaluate(async () => {
    const { Chart } = await import("/assets/charts.js");
    const draw = async (values) => {
      const chart = new Chart("Test", { show: String, clip: true, series: [{ label: "Values", column: "values", colour: "read" }] });
      document.body.append(chart.element);
      const end = Math.floor(Date.now() / 1000);
      const samples = { time_ms: values.map((_, n) => (end - values.length + n) * 1000), step_ms: values.map(() => 1000), values };
      chart.draw(samples, end - values.length, end);
      // The chart library draws after the running code.
      const seen = async () => {
        await new Promise(requestAnimationFrame);
        return { top: chart.plot.scales.y.max, button: chart.peaks.hidden ? null : chart.peaks.textContent };
      };
      const first = await seen();
      chart.showPeaks();
      const whole = await seen();
      chart.element.remove();
      return [first, whole];
    };
    const usual = Array.from({ length: 200 }, (_, n) => 90 + (n % 10));
    return { rare: await draw(usual.with(150, 5000)), steady: await draw(usual), few: await draw([...usual.slice(0, 40), 5000]) };
  });
  const [cut, whole] = scales.rare;
  assert.ok(cut.top > 100 && cut.top < 200, `a scale up to ${cut.top} for values up to 99`);
  assert.equal(cut.button, "peaks to 5000 cut off: show");
  assert.ok(whole.top >= 5000, `a scale up to ${whole.top} for a peak of 5000`);
  assert.equal(whole.button, "cut peaks off");
  assert.equal(scales.steady[0].button, null);
  assert.ok(scales.steady[0].top < 120);
  assert.ok(scales.few[0].button === null && scales.few[0].top >= 5000, "among few samples nothing is rare");
  await done();
});

/** The page had the backticks of messages. */
test("commands in messages are code", async () => {
  const { page, done } = await open("");
  const parts = await page.evaluate(async () => {
    const { el, prose } = await import("/assets/format.js");
    return ["run `ubcache reload`, then wait", "no command", "one ` alone"].map((text) => el("p", {}, prose(text)).innerHTML);
  });
  assert.deepEqual(parts, ["run <code>ubcache reload</code>, then wait", "no command", "one ` alone"]);
  await done();
});

test("a set shows its buckets and the cache device", async () => {
  const { page, shoot, done } = await open(setPage());
  await drawn(page, "Buckets", ["dirty", "metadata", "unused"]);
  await drawn(page, "Requests to the cache device", ["read", "write"]);
  await drawn(page, "Throughput of the cache device", ["read", "write"]);
  await drawn(page, "Data in the cache", ["clean", "dirty"]);
  const label = await page.getByRole("img", { name: /What the buckets of the cache device hold: dirty \d/ }).getAttribute("aria-label");
  const map = await world.ask("GET", `/v1/sets/${world.set}/buckets?cells=10`);
  assert.equal(map.columns.dirty.length, 10);
  assert.match(label, /unused/);
  const canvas = chart(page, "Buckets").locator("canvas");
  await canvas.hover({ position: { x: 5, y: 5 } });
  await page.getByText(/^bucket.* at 0 B: .*metadata/).waitFor();
  await isAccessible(page, "set");
  await shoot("set-desktop-light");
  await done();
});

test("a volume without a cache is shown as what it is", async () => {
  const { page, done } = await open(volumePage("spare"));
  await page.locator(".chip", { hasText: "no cache" }).waitFor();
  await drawn(page, "Requests", ["read"]);
  await drawn(page, "What reaches the backing device", ["read"]);
  assert.equal(await page.getByRole("button", { name: "Detach…" }).isVisible(), false);
  await done();
});

test("a tunable is changed after a confirmation", async () => {
  const { page, shoot, done, expected } = await open(volumePage("archive"));
  const dialog = page.getByRole("dialog");
  const change = page.getByRole("button", { name: "Change writeback_percent" });
  const before = await value("archive", "writeback_percent");
  assert.equal(await change.isVisible(), false, "groups are folded");
  await page.locator("summary", { hasText: "Dangerous" }).click();
  await page.getByRole("button", { name: "Change io_disable" }).waitFor();
  await find(page, "writeback_percent");

  await change.click();
  assert.equal(await focused(page), "Cancel", "Enter without a look changes nothing");
  assert.ok(await dialog.getByRole("button", { name: "Change", exact: true }).isDisabled(), "nothing to do yet");
  await dialog.getByLabel("Value in %").fill("25");
  await dialog.getByText("writeback_percent becomes 25").waitFor();
  await dialog.getByText(/^About .* may be dirty/).waitFor();
  await shoot("tunable-desktop-light", false);
  await isAccessible(page, "dialog");
  await page.keyboard.press("Escape");
  await dialog.waitFor({ state: "hidden" });
  assert.equal(await value("archive", "writeback_percent"), before, "nothing was confirmed");

  await change.click();
  await dialog.getByLabel("Value in %").fill("25");
  await page.keyboard.press("Enter");
  await dialog.waitFor({ state: "hidden" });
  assert.equal(await value("archive", "writeback_percent"), "25");
  const row = page.locator('tr[data-key="writeback_percent"]');
  await row.getByText("25 %").waitFor();

  await row.getByRole("button", { name: "Reset writeback_percent" }).click();
  await dialog.getByText("The value that was set at run time").waitFor();
  assert.equal(await focused(page), "Cancel");
  await dialog.getByRole("button", { name: "Reset" }).click();
  await until("the default", async () => (await value("archive", "writeback_percent")) === before);

  // The page shows the daemon's message for a refused change.
  expected.push("400", "409");
  await find(page, "sequential_cutoff");
  await page.getByRole("button", { name: "Change sequential_cutoff" }).click();
  await dialog.getByLabel("Value in bytes").fill("many");
  await dialog.getByRole("button", { name: "Change", exact: true }).click();
  await dialog.getByRole("alert").getByText(/sequential_cutoff/).waitFor();
  await dialog.getByRole("button", { name: "Cancel" }).click();
  await done();
});

test("a tunable of a set is changed for this run only", async () => {
  const { page, done } = await open(setPage());
  await find(page, "journal_delay_ms");
  await page.getByRole("button", { name: "Change journal_delay_ms" }).click();
  const dialog = page.getByRole("dialog");
  await dialog.getByLabel("Value in ms").fill("50");
  await dialog.getByLabel("only until the daemon starts again").check();
  await dialog.getByText("It holds until the daemon starts again.").waitFor();
  await dialog.getByRole("button", { name: "Change", exact: true }).click();
  await page.locator('tr[data-key="journal_delay_ms"]').getByText("50 ms").waitFor();
  assert.equal((await world.ask("GET", `/v1/sets/${world.set}/tunables/journal_delay_ms`)).tunable.value, "50");
  await done();
});

test("another cache mode: what happens to dirty data is said first", async () => {
  const { page, shoot, done } = await open(volumePage("archive"), { viewport: PHONE, colorScheme: "dark" });
  await until("dirty data", async () => (await now("archive")).dirty_bytes > 0);
  await page.getByRole("button", { name: "Change mode…" }).click();
  const dialog = page.getByRole("dialog");
  await dialog.getByLabel("Mode (writeback now)").selectOption("writethrough");
  await dialog.getByText(/of dirty data stay on the cache device until they are written back/).waitFor();
  await fitsThePhone(page);
  await shoot("mode-phone-dark", false);
  await isAccessible(page, "mode");
  await dialog.getByRole("button", { name: "Change to writethrough" }).click();
  await dialog.waitFor({ state: "hidden" });
  assert.equal((await now("archive")).cache_mode, "writethrough");
  await page.locator(".chip", { hasText: "writethrough" }).waitFor();
  await page.getByRole("button", { name: "Change mode…" }).click();
  await dialog.getByLabel("Mode (writethrough now)").selectOption("writeback");
  await dialog.getByText(/newest data is on the cache device alone/).waitFor();
  await dialog.getByRole("button", { name: "Change to writeback" }).click();
  await until("the mode", async () => (await now("archive")).cache_mode === "writeback");
  await done();
});

test("a job is begun, is seen, and ends", async () => {
  const { page, shoot, done } = await open(volumePage("archive"));
  await page.getByRole("button", { name: "Drain…" }).click();
  const dialog = page.getByRole("dialog");
  await dialog.getByText(/of dirty data are written to the backing device/).waitFor();
  await dialog.getByRole("button", { name: "Drain" }).click();
  const jobs = page.getByRole("region", { name: "Jobs" });
  await jobs.getByText("drain", { exact: false }).first().waitFor();
  await shoot("job-desktop-light", false);
  await until("its end", async () => (await world.ask("GET", "/v1/jobs")).jobs.every((j) => j.state !== "running") || null);
  await jobs.getByText("done").first().waitFor();
  await page.getByRole("region", { name: "Events", exact: true }).getByText(/job \d+: drain .*: done/).waitFor();
  await drawn(page, "What reaches the backing device", ["writeback"]);
  await done();
});

for (const [size, viewport] of [["desktop", DESKTOP], ["phone", PHONE]]) {
  for (const colorScheme of ["light", "dark"]) {
    test(`it reads well: ${size}, ${colorScheme}`, async () => {
      for (const [name, where] of [["overview", ""], ["volume", volumePage("archive")], ["set", setPage()]]) {
        const { page, shoot, done } = await open(where, { viewport, colorScheme });
        const background = await page.evaluate(() => getComputedStyle(document.body).backgroundColor.match(/\d+/g).map(Number)[0]);
        assert.equal(background < 100, colorScheme === "dark", `background ${background}`);
        if (name === "volume") {
          await page.getByRole("button", { name: "1 min" }).click();
          await drawn(page, "Requests", ["read"]);
          await drawn(page, "What reaches the backing device", ["writeback"]);
        }
        if (name === "set") await drawn(page, "Buckets", ["dirty"]);
        if (viewport === PHONE) await fitsThePhone(page);
        await isAccessible(page, `${name} ${size} ${colorScheme}`);
        await shoot(`${name}-${size}-${colorScheme}`);
        await done();
      }
    });
  }
}

test("the theme can be chosen, and is remembered", async () => {
  const { page, done } = await open("");
  const dark = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor.match(/\d+/g).map(Number)[0] < 100);
  assert.equal(await dark(), false);
  await page.getByLabel("Theme").selectOption("dark");
  assert.equal(await dark(), true);
  await page.reload();
  assert.equal(await dark(), true);
  await done();
});

test("a token in the address is kept in the tab and sent with each request", async () => {
  const { page, done } = await open("#token=a%20secret");
  assert.equal(await page.evaluate(() => sessionStorage.getItem("ubcache-token")), "a secret");
  assert.equal(new URL(page.url()).hash, "#/");
  const request = await page.waitForRequest((r) => r.url().includes("/v1/status"));
  assert.equal(request.headers().authorization, "Bearer a secret");
  await done();
});

test("where a token is wanted, it is asked for", async () => {
  const place = await world.guarded("open sesame");
  try {
    const { page, shoot, done, expected } = await open("", { origin: place.origin, live: false, viewport: PHONE });
    expected.push("401");
    const dialog = page.getByRole("dialog");
    await dialog.getByText("this needs the token of the daemon").waitFor();
    await dialog.getByLabel("Token of this daemon").fill("wrong");
    await page.keyboard.press("Enter");
    await dialog.waitFor({ state: "hidden" });
    await dialog.getByLabel("Token of this daemon").fill("open sesame");
    await shoot("token-phone-light", false);
    await page.keyboard.press("Enter");
    await page.getByText("live", { exact: true }).waitFor();
    await page.getByRole("main").getByRole("link", { name: /archive/ }).waitFor();
    await done();

    const given = await open("#token=open%20sesame", { origin: place.origin });
    await given.page.getByRole("main").getByRole("link", { name: /archive/ }).waitFor();
    await given.done();
  } finally {
    place.end();
  }
});

test("pages of others may ask nothing", async () => {
  for (const headers of [{ Origin: "http://evil.example" }, { "Sec-Fetch-Site": "cross-site" }, { Host: "evil.example", "User-Agent": "Mozilla/5.0" }]) {
    const { status, text } = await world.raw("POST", `/v1/volumes/${world.volumes.archive}/detach`, {}, { Host: "127.0.0.1", ...headers });
    assert.equal(status, 403, text);
  }
  // The same in the browser: a page of another origin, which is this host under another name.
  const context = await browser.newContext();
  const page = await context.newPage();
  const other = world.origin.replace("127.0.0.1", "[::1]");
  await page.route(`${other}/**`, (route) => route.fulfill({ contentType: "text/html", body: "<title>evil</title>" }));
  await page.goto(`${other}/`);
  const sent = await page.evaluate((to) => fetch(to, { method: "POST", mode: "no-cors", body: "{}" }).then(() => "sent", () => "failed"), `${world.origin}/v1/volumes/${world.volumes.archive}/detach`);
  assert.ok(["sent", "failed"].includes(sent));
  await context.close();
  assert.equal((await world.ask("GET", "/v1/jobs")).jobs.some((j) => j.kind === "detach"), false, "nothing was detached");
});

test("it says when the daemon does not answer, and continues when it answers again", async () => {
  const { page, done, expected } = await open("");
  expected.push("net::ERR_FAILED");
  await page.route("**/v1/**", (route) => route.abort());
  await page.getByText("no answer, retrying").waitFor();
  await page.unroute("**/v1/**");
  await page.getByText("live", { exact: true }).waitFor();
  await done();
});

test("the vendored chart library is what its package has", () => {
  const require = createRequire(import.meta.url);
  const ours = path.join(FILES, "vendor/uplot");
  const theirs = path.dirname(require.resolve("uplot/package.json"));
  for (const [mine, file] of [["uPlot.iife.min.js", "dist/uPlot.iife.min.js"], ["uPlot.min.css", "dist/uPlot.min.css"], ["LICENSE", "LICENSE"]]) {
    assert.ok(fs.readFileSync(path.join(ours, mine)).equals(fs.readFileSync(path.join(theirs, file))), mine);
  }
});
