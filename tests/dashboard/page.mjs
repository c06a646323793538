// Shared by the tests: a browser, pages that fail for every error and every foreign request, and what is looked for in them.

import assert from "node:assert/strict";
import fs from "node:fs";
import { createRequire } from "node:module";
import path from "node:path";

import { chromium } from "playwright-core";

import { needed, until } from "./world.mjs";

const axe = fs.readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const artefacts = needed("UBCACHE_ARTEFACTS");
export const FILES = new URL("../../crates/daemon/web", import.meta.url).pathname;
/** Whether the page's files come from the source tree instead of the program, for work on them. */
const TREE = process.env.UBCACHE_DASHBOARD_TREE === "1";
export const DESKTOP = { width: 1440, height: 900 };
export const PHONE = { width: 390, height: 844 };
/** Both sizes in both themes. */
export const LOOKS = [["desktop", DESKTOP, "light"], ["desktop", DESKTOP, "dark"], ["phone", PHONE, "light"], ["phone", PHONE, "dark"]];
/** Whether the pictures of the documentation are drawn again (`docs/dashboard`, and those of the guide). */
export const DRAWS = process.env.UBCACHE_DASHBOARD_DRAW === "1";
const PICTURES = new URL("../../docs/dashboard", import.meta.url).pathname;
const GUIDE = new URL("../../docs/book/src", import.meta.url).pathname;
/** A browser in which no host name resolves, so a request to another host fails and is recorded. */
export function launch() {
  fs.mkdirSync(artefacts, { recursive: true });
  const args = ["--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1", "--disable-background-networking"];
  return chromium.launch({ executablePath: needed("CHROMIUM"), chromiumSandbox: false, args });
}

/** A page that fails the test for every error in the console and every request to another origin. With `status` it gets this answer of the daemon again and again. */
export async function open(browser, origin, where, { viewport = DESKTOP, colorScheme = "light", live = true, status } = {}) {
  const phone = viewport === PHONE;
  const context = await browser.newContext({ viewport, colorScheme, hasTouch: phone, isMobile: phone, deviceScaleFactor: phone ? 2 : 1 });
  if (TREE) {
    await context.route((url) => url.pathname === "/" || url.pathname.startsWith("/assets/"), async (route) => {
      const name = new URL(route.request().url()).pathname.replace(/^\/(assets\/)?/, "") || "index.html";
      // A file that the program does not have yet is served, too.
      const contentType = { html: "text/html", css: "text/css", js: "text/javascript", svg: "image/svg+xml" }[name.split(".").pop()];
      await route.fulfill({ response: await route.fetch(), status: 200, contentType, body: fs.readFileSync(path.join(FILES, name)) });
    });
  }
  if (status) await context.route((url) => url.pathname === "/v1/status", (route) => route.fulfill({ json: status }));
  const page = await context.newPage();
  const wrong = [];
  const expected = [];
  page.on("request", (r) => r.url().startsWith(`${origin}/`) || wrong.push(`a request to ${r.url()}`));
  page.on("pageerror", (e) => wrong.push(`an error: ${e.stack}`));
  page.on("console", (m) => {
    const text = m.text();
    if (["error", "warning"].includes(m.type()) && !expected.some((e) => text.includes(e))) wrong.push(`the console: ${text}`);
  });
  await page.goto(`${origin}/${where}`);
  if (live) await page.getByText("live", { exact: true }).waitFor();
  const shoot = async (name, whole = true) => page.screenshot({ path: path.join(artefacts, `${name}.png`), fullPage: whole, scale: DRAWS ? "css" : "device" });
  const done = async () => {
    await context.unrouteAll({ behavior: "ignoreErrors" });
    await context.close();
    assert.deepEqual(wrong, []);
  };
  return { page, shoot, done, expected };
}

/** Stores a screenshot of the whole page for the documentation, as a small file. */
export async function keep(browser, name, png) {
  const page = await browser.newPage();
  const encoded = await page.evaluate(async (data) => {
    const image = new Image();
    image.src = `data:image/png;base64,${data}`;
    await image.decode();
    const canvas = Object.assign(document.createElement("canvas"), { width: image.width, height: image.height });
    canvas.getContext("2d").drawImage(image, 0, 0);
    return canvas.toDataURL("image/webp", 0.8).split(",")[1];
  }, png.toString("base64"));
  await page.close();
  fs.mkdirSync(PICTURES, { recursive: true });
  fs.writeFileSync(path.join(PICTURES, `${name}.webp`), Buffer.from(encoded, "base64"));
}

/** Draws a picture of the guide again: the upper part of a page, on a screen of this size. */
export async function drawForTheGuide(page, name, viewport) {
  if (!DRAWS) return;
  await page.setViewportSize(viewport);
  await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
  await page.screenshot({ path: path.join(GUIDE, `${name}.png`), scale: "css" });
}

/** Waits until no chart of the page is empty. */
export const hasSamples = (page) => until("samples in all charts", async () => (await page.locator(".chart").count()) > 0 && (await page.locator(".chart .empty:visible").count()) === 0);

/** The number of pixels of a canvas that are close to a colour of the page; half transparent ones do not count. */
const pixels = (canvas, colour) => canvas.evaluate((element, name) => {
  const probe = document.createElement("i");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const wanted = getComputedStyle(probe).color.match(/\d+/g).map(Number);
  probe.remove();
  // Reads a copy, because the browser draws a canvas that was read in another way from then on.
  const copy = Object.assign(document.createElement("canvas"), { width: element.width, height: element.height });
  const pen = copy.getContext("2d", { willReadFrequently: true });
  pen.drawImage(element, 0, 0);
  const data = pen.getImageData(0, 0, element.width, element.height).data;
  let found = 0;
  for (let i = 0; i < data.length; i += 4) {
    const off = Math.max(...[0, 1, 2].map((k) => Math.abs(data[i + k] - wanted[k])));
    if (data[i + 3] > 150 && off < 40) found += 1;
  }
  return found;
}, colour);

export const chart = (page, name) => page.getByRole("region", { name, exact: true });

export async function drawn(page, name, colours) {
  const canvas = chart(page, name).locator("canvas");
  for (const colour of colours) {
    await until(`${name}: ${colour}`, async () => (await pixels(canvas, colour)) > 15);
  }
}

export async function fitsThePhone(page) {
  const [inner, content] = await page.evaluate(() => [innerWidth, document.documentElement.scrollWidth]);
  assert.ok(content <= inner, `${content} pixels wide on a screen of ${inner}`);
}

export async function isAccessible(page, what) {
  await page.evaluate(axe);
  const found = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
  const said = found.violations.map((v) => `${v.id}: ${v.help}\n${v.nodes.map((n) => `    ${n.html} ${n.failureSummary}`).join("\n")}`);
  assert.deepEqual(said, [], what);
}

/** The text of the element that has the focus. */
export const focused = (page) => page.evaluate(() => document.activeElement.textContent);
