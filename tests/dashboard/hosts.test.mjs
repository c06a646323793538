// Tests the dashboard on hosts in trouble, on a host with many volumes, over a restart, and what it does to devices and volumes.

import assert from "node:assert/strict";
import fs from "node:fs";
import { after, before, test } from "node:test";

import { DESKTOP, DRAWS, LOOKS, PHONE, drawForTheGuide, drawn, fitsThePhone, focused, hasSamples, isAccessible, keep, launch, open } from "./page.mjs";
import { World, until } from "./world.mjs";

let browser;

before(async () => {
  browser = await launch();
});

after(async () => {
  await browser?.close();
});

/** Runs a test on a host of its own. */
async function withHost(plan, work) {
  const world = await World.start(plan);
  try {
    await work(world);
  } catch (e) {
    // The daemon's end may be of no interest then.
    await world.end().catch(() => {});
    throw e;
  }
  await world.end();
}

const TWO_CACHES = {
  caches: [{ name: "nvme", size: 64, volumes: [["mail", 128]] }, { name: "optane", size: 64, volumes: [["orders", 256]] }],
  alone: [["photos", 64], ["spare", 64]],
};

/**
 * Screenshots of a page in both sizes and both themes, with the checks that hold for all. Clients of the volumes `busy` work
 * meanwhile, so that the charts have lines. With `status` the pages show this answer of the daemon. The screenshots are kept in `docs/dashboard` if they are drawn again.
 */
async function look(world, name, where, ready, busy = [], status = undefined) {
  const stop = world.busy(busy);
  if (busy.length) await world.samples(DRAWS ? 62 : 5);
  for (const [size, viewport, colorScheme] of LOOKS) {
    const { page, shoot, done } = await open(browser, world.origin, where, { viewport, colorScheme, status });
    await ready(page);
    if (busy.length) {
      await page.getByRole("button", { name: "1 min" }).click();
      await hasSamples(page);
    }
    if (viewport === PHONE) await fitsThePhone(page);
    await isAccessible(page, `${name} ${size} ${colorScheme}`);
    // Rates are those between two answers of the daemon.
    if (busy.length) await page.locator("table.volumes").getByText(/\d\/s/).first().waitFor();
    // The bar at the top stays in view, and would lie over the middle of the picture.
    await page.evaluate(() => scrollTo(0, 0));
    await page.mouse.move(0, 0);
    const picture = await shoot(`${name}-${size}-${colorScheme}`);
    if (DRAWS && busy.length) await keep(browser, `${name}-${size}-${colorScheme}`, picture);
    if (name === "waiting" && size === "desktop" && colorScheme === "light") await drawForTheGuide(page, "dashboard-waiting", { width: 1280, height: 800 });
    if (name === "degraded" && size === "desktop" && colorScheme === "light") await drawForTheGuide(page, "dashboard-group", { width: 1280, height: 800 });
    if (name === "many" && size === "phone" && colorScheme === "dark") await drawForTheGuide(page, "dashboard-phone", PHONE);
    await done();
  }
  await stop();
}

test("one volume on a quiet host", async () => {
  await withHost({ caches: [{ name: "nvme", size: 64, volumes: [["data", 256]] }], alone: [] }, async (world) => {
    await world.fill("data", 2);
    await look(world, "one", "", async (page) => {
      await page.getByRole("banner").getByText("No problems").waitFor();
      await page.getByRole("region", { name: "Cache nvme" }).getByRole("link", { name: "data" }).waitFor();
    }, ["data"]);
    if (!DRAWS) return;
    const stop = world.busy(["data"]);
    const { page, done } = await open(browser, world.origin, `#/volume/${world.volumes.data}`);
    await page.getByRole("button", { name: "1 min" }).click();
    await hasSamples(page);
    await drawn(page, "Throughput", ["write"]);
    const facts = page.getByRole("region", { name: "Facts" });
    await until("latencies", async () => ((await facts.textContent()).match(/p99\d[\d.]* (µs|ms|s)/g) ?? []).length === 2);
    await drawForTheGuide(page, "dashboard-volume", { width: 1280, height: 800 });
    await done();
    await stop();
  });
});

/**
 * After a start without a cache device, a disk waits with data whose newest version is on that cache device. An operator who
 * sees only the other volumes does not notice it, so it is the first problem.
 */
test("a waiting disk with dirty data is the first problem, then what has failed", async () => {
  await withHost(TWO_CACHES, async (world) => {
    await world.fill("orders", 4);
    assert.equal(await world.stop(), 0);
    fs.renameSync(world.at("optane"), world.at("away"));
    world.overwrite("photos-disk", 4096);
    await world.run();

    await look(world, "waiting", "", async (page) => {
      await page.getByRole("banner").getByText("3 problems").waitFor();
      const problems = page.getByRole("region", { name: "Problems" });
      assert.deepEqual(await problems.getByRole("heading", { level: 3 }).allTextContents(), ["orders waits, with dirty data", "optane has failed", "photos-disk has failed"]);
      assert.ok((await page.title()).startsWith("(3) "), await page.title());
    }, ["mail", "spare"]);

    // The cache device is back: it is registered from the page, and nothing is wrong with orders any more.
    const { page, done } = await open(browser, world.origin, "");
    fs.renameSync(world.at("away"), world.at("optane"));
    await page.getByRole("button", { name: "Register… (optane has failed)" }).click();
    const dialog = page.getByRole("dialog");
    assert.equal(await focused(page), "Cancel");
    await dialog.getByText(/waits for its cache device/).waitFor();
    assert.equal(await dialog.getByLabel("Paths of the devices").inputValue(), world.at("optane"));
    await dialog.getByRole("button", { name: "Register", exact: true }).click();
    await dialog.waitFor({ state: "hidden" });
    await page.getByRole("banner").getByText("1 problem").waitFor();
    await page.getByRole("region", { name: "Cache optane" }).getByRole("row", { name: /orders.*dirty/ }).waitFor();
    await done();
  });
});

/** The requests of a dirty volume fail with its cache, so its normal state must not be shown for it. */
test("a failed cache is a problem, and so are its dirty volumes", async () => {
  await withHost(TWO_CACHES, async (world) => {
    await world.fill("mail", 4);
    await until("the failure", async () => {
      fs.truncateSync(world.at("nvme"), 4096);
      await world.read("mail", 4).catch(() => {});
      const { sets } = await world.ask("GET", "/v1/status");
      return sets.some((s) => s.set?.failed);
    });
    await look(world, "failed", "", async (page) => {
      await page.getByRole("region", { name: "Problems" }).getByRole("heading", { name: "Cache nvme is disabled" }).waitFor();
      await page.getByText(/dirty data is on this cache device alone \(.* of mail \(/).waitFor();
      await page.getByRole("region", { name: "Cache nvme" }).locator(".chip", { hasText: "requests fail" }).waitFor();
      // The volumes of the other cache and without a cache are as before.
      await page.getByRole("region", { name: "Cache optane" }).locator(".chip", { hasText: "serving" }).waitFor();
    }, ["orders", "photos"]);
    world.broken = true;
  });
});

/** The page counted the dirty data of a stopped volume, and `status` did not. */
test("the page has the problems of the status", async () => {
  await withHost(TWO_CACHES, async (world) => {
    await world.fill("mail", 4);
    await world.ask("POST", `/v1/volumes/${world.volumes.mail}/stop`);
    const { page, done } = await open(browser, world.origin, "");
    assert.deepEqual((await world.ask("GET", "/v1/status")).problems, []);
    await page.getByRole("banner").getByText("No problems").waitFor();
    await world.ask("PUT", `/v1/volumes/${world.volumes.orders}/tunables/io_disable`, { value: "1" });
    const [problem] = (await world.ask("GET", "/v1/status")).problems;
    await page.getByRole("banner").getByText("1 problem").waitFor();
    const problems = page.getByRole("region", { name: "Problems" });
    await problems.getByRole("heading", { name: "orders fails every request" }).waitFor();
    assert.equal(await problems.locator("code.next").textContent(), problem.command);
    await world.ask("PUT", `/v1/volumes/${world.volumes.orders}/tunables/io_disable`, { value: "0" });
    await page.getByRole("banner").getByText("No problems").waitFor();
    await done();
  });
});

/** Damaged dirty data was not on the page. */
test("damaged dirty data is listed with its commands", async () => {
  await withHost({ ...TWO_CACHES, checksums: true }, async (world) => {
    await world.fill("mail", 1);
    assert.equal(await world.stop(), 0);
    world.damage("nvme");
    await world.run();
    await world.read("mail", 1).catch(() => {});
    await until("the damage", async () => (await world.ask("GET", "/v1/status")).problems.some((p) => p.kind === "damaged"));
    const { damaged: [first] } = await world.ask("GET", `/v1/volumes/${world.volumes.mail}/damaged`);
    const { page, done } = await open(browser, world.origin, "");
    await page.getByRole("region", { name: "Problems" }).getByRole("link", { name: "Cache nvme has damaged dirty data" }).click();
    const card = page.getByRole("region", { name: "Damaged dirty data" });
    const range = `${first.sector}+${first.sectors}`;
    await card.getByRole("row", { name: new RegExp(`mail.*${first.sector}\\+${first.sectors}`) }).waitFor();
    await isAccessible(page, "damaged");
    await page.goto(`${world.origin}/#/volume/${world.volumes.mail}`);
    await card.getByText(`ubcache damaged mail drop --range ${range} --yes`).waitFor();
    await done();
  });
});

/** What the daemon alone knows is no problem of a set, a volume or a device. */
test("a state that cannot be stored is a problem until it is stored", async () => {
  await withHost(TWO_CACHES, async (world) => {
    const spare = (await world.ask("GET", "/v1/status")).devices.find((d) => d.label === "spare");
    fs.renameSync(world.at("state"), world.at("aside"));
    fs.writeFileSync(world.at("state"), "in the way");
    const answer = await world.ask("POST", "/v1/unregister", { device: spare.path });
    assert.match(answer.not_stored, /cannot be written: Not a directory/);
    await look(world, "not-stored", "", async (page) => {
      await page.getByRole("region", { name: "Problems" }).getByRole("heading", { name: "The state cannot be stored" }).waitFor();
    });
    const { page, done } = await open(browser, world.origin, "");
    fs.rmSync(world.at("state"));
    fs.renameSync(world.at("aside"), world.at("state"));
    await page.getByRole("banner").getByText("No problems").waitFor();
    await done();
  });
});

/** Two cache devices with two disks. Nothing is written back, so that the dirty data stays. */
const GROUP = {
  caches: [],
  alone: [],
  group: { caches: [["nvme0", 96], ["nvme1", 96]], volumes: [["mail", 128], ["orders", 256]], checksums: true },
  config: "takeover_after_s = 0\n[tunables]\nwriteback_running = 0\nsequential_cutoff = 0\n",
};

const chips = (element) => element.locator(".chip").allTextContents();

/** The page had the sets of a group side by side with all others, and neither roles nor copies. */
test("a group shows its cache devices, the roles of each volume, and a loss with its time and the next command", async () => {
  await withHost(GROUP, async (world) => {
    await world.fill("mail", 4);
    await world.fill("orders", 2);
    await look(world, "group", "", async (page) => {
      const group = page.getByRole("region", { name: "Group of nvme0 and nvme1" });
      await group.getByText("All dirty data is in two sets").waitFor();
      for (const name of ["Cache nvme0", "Cache nvme1"]) await group.getByRole("heading", { name, level: 3 }).waitFor();
      await group.getByRole("row", { name: /^mail .*in both sets .*nvme0 .*nvme1 / }).waitFor();
      await group.getByRole("row", { name: /^orders .*in both sets .*nvme1 .*nvme0 / }).waitFor();
      assert.ok((await chips(group)).includes("protected"));
      await page.getByRole("banner").getByText("No problems").waitFor();
    }, ["mail", "orders"]);

    // Each member says what its last scrub has found.
    const { page, done } = await open(browser, world.origin, `#/set/${world.sets.nvme0}`);
    const scrub = page.getByRole("region", { name: "Scrub" });
    await scrub.getByText("never done").waitFor();
    await page.getByText("In one group with Cache nvme1.").waitFor();
    await world.ask("POST", `/v1/sets/${world.sets.nvme0}/scrub`);
    await scrub.locator(".chip", { hasText: /^done$/ }).waitFor();
    await scrub.getByText(/Verified[1-9][\d.]* MiB/).waitFor();
    await isAccessible(page, "scrub");
    await page.goto(`${world.origin}/#/volume/${world.volumes.mail}`);
    const copies = page.getByRole("region", { name: "Copies of the dirty data" });
    await copies.getByText("in both sets").waitFor();
    await copies.getByRole("link", { name: "Cache nvme1" }).waitFor();
    await done();

    // One cache device does not come back.
    assert.equal(await world.stop(), 0);
    fs.renameSync(world.at("nvme1"), world.at("away"));
    const begin = Math.floor(Date.now() / 1000);
    await world.run();
    await until("the takeover", async () => (await world.copies()).length === 2);
    const [{ one_copy_since_unix_seconds: since }] = await world.copies();
    assert.ok(since >= begin && since <= Date.now() / 1000, `since ${since}, begun at ${begin}`);
    await look(world, "degraded", "", async (page) => {
      const group = page.getByRole("region", { name: "Group of nvme0" });
      await group.locator(".chip", { hasText: /^degraded$/ }).waitFor();
      await group.getByText(/MiB of dirty data on one cache device only, since .* \d\d:\d\d \(/).waitFor();
      await group.getByText("No other cache device of this group is served.").waitFor();
      for (const label of ["mail", "orders"]) await group.getByRole("row", { name: new RegExp(`^${label} .*one copy .*nvme0 .*none`) }).waitFor();
      const problems = page.getByRole("region", { name: "Problems" });
      await problems.getByRole("heading", { name: "orders has one copy of its dirty data" }).waitFor();
      assert.equal(await group.locator("code.next").textContent(), "ubcache register CACHE-DEVICE");
    }, ["mail", "orders"]);

    // The time outlives the daemon, and the copy ends it.
    assert.equal(await world.stop(), 0);
    await world.run();
    await until("the takeover", async () => (await world.copies()).length === 2);
    assert.ok((await world.copies()).every((copy) => copy.one_copy_since_unix_seconds === since), "after a restart");
    const after = await open(browser, world.origin, "");
    const card = after.page.getByRole("region", { name: /^Group of / });
    await card.locator(".chip", { hasText: /^degraded$/ }).waitFor();
    fs.renameSync(world.at("away"), world.at("nvme1"));
    await world.register("nvme1");
    await card.getByText("All dirty data is in two sets").waitFor();
    await card.getByRole("heading", { name: "Cache nvme1", level: 3 }).waitFor();
    await after.page.getByRole("banner").getByText("No problems").waitFor();
    assert.ok((await world.copies()).every((copy) => copy.complete && copy.one_copy_since_unix_seconds === null));
    await after.done();
  });
});

/** The copy of files takes less time than a look at the page, so the page shows an answer of the daemon from its middle. */
test("a resync shows its bytes and its share", async () => {
  const group = { caches: [["nvme0", 768], ["nvme1", 768]], volumes: [["mail", 512]] };
  await withHost({ ...GROUP, group }, async (world) => {
    const away = () => world.ask("POST", "/v1/unregister", { device: world.at("nvme1") });
    const copyIn = (status) => status.sets.flatMap((s) => s.volumes)[0]?.copy;
    await away();
    await world.fill("mail", 256);
    const status = await until("a resync under way", async () => {
      await world.register("nvme1");
      for (;;) {
        const status = await world.ask("GET", "/v1/status");
        const copy = copyIn(status);
        if (copy?.copied_percent >= 20 && copy.copied_percent < 90) return status;
        if (copy?.complete) break;
      }
      await away();
      return null;
    });
    const copy = copyIn(status);
    assert.ok(copy.copied_bytes > 0 && copy.copied_bytes < copy.one_copy_bytes, JSON.stringify(copy));
    const share = Math.floor(copy.copied_percent);
    assert.ok(Math.abs((100 * copy.copied_bytes) / copy.one_copy_bytes - share) <= 1.1, JSON.stringify(copy));
    await until("the copy", async () => (await world.copies()).every((c) => c.complete));
    await look(world, "resync", "", async (page) => {
      const group = page.getByRole("region", { name: "Group of nvme0 and nvme1" });
      await group.locator(".chip", { hasText: /^degraded, copying$/ }).waitFor();
      await group.getByText(new RegExp(`MiB of 256 MiB copied \\(${share} %\\)`)).waitFor();
      assert.equal(await group.getByRole("progressbar", { name: "Copy of the dirty data" }).getAttribute("aria-valuenow"), String(share));
      await group.getByRole("row", { name: new RegExp(`^mail .*copying, ${share} % .*nvme0 .*nvme1`) }).waitFor();
      assert.equal(await group.locator("code.next").isVisible(), false, "the daemon makes the copy");
    }, [], status);
    const { page, done } = await open(browser, world.origin, `#/volume/${world.volumes.mail}`, { status });
    await page.getByRole("region", { name: "Copies of the dirty data" }).getByRole("progressbar").waitFor();
    await isAccessible(page, "resync of a volume");
    await done();
    const now = await open(browser, world.origin, "");
    await now.page.getByText("All dirty data is in two sets").waitFor();
    await now.done();
  });
});

test("24 volumes are found by their labels", async () => {
  const labels = Array.from({ length: 24 }, (_, n) => `vm-${n + 1}`);
  await withHost({ caches: [{ name: "nvme", size: 192, volumes: labels.map((label) => [label, 16]) }], alone: [] }, async (world) => {
    await world.fill("vm-2", 2);
    await look(world, "many", "", async (page) => {
      const table = page.getByRole("region", { name: "Cache nvme" }).getByRole("table");
      await until("all volumes", async () => (await table.getByRole("link").count()) === 24);
      // In the order of people, not of characters, and without the numbers of the daemon.
      assert.deepEqual((await table.getByRole("link").allTextContents()).slice(0, 3), ["vm-1", "vm-2", "vm-3"]);
    }, labels);
    const { page, done } = await open(browser, world.origin, "", { viewport: PHONE });
    await page.getByLabel("Go to").selectOption({ label: "\u00a0\u00a0vm-17" });
    await page.getByRole("heading", { name: "vm-17", level: 1 }).waitFor();
    await done();
  });
});

/** An operator restarts the daemon after a problem, and looks then at what was before. */
test("the history is there after a restart", async () => {
  await withHost({ caches: [{ name: "nvme", size: 64, volumes: [["mail", 128]] }], alone: [] }, async (world) => {
    const history = async () => (await world.ask("GET", `/v1/volumes/${world.volumes.mail}/history`)).columns;
    await until("samples of writes", async () => {
      await world.fill("mail", 1);
      return (await history()).written_bytes?.some((n) => n > 1000);
    });
    const before = await history();
    assert.equal(await world.stop(), 0);
    await world.run();
    const after = await history();
    const same = before.time_ms.filter((t) => after.time_ms.includes(t)).length;
    assert.equal(same, before.time_ms.length, "every sample of before is there");
    const { page, done } = await open(browser, world.origin, `#/volume/${world.volumes.mail}`);
    await drawn(page, "Throughput", ["write"]);
    await done();

    // A damaged file costs the history, not the start.
    assert.equal(await world.stop(), 0);
    fs.writeFileSync(world.at("state/history"), "damaged");
    await world.run();
    assert.ok(!(await history()).time_ms?.includes(before.time_ms[0]));
    assert.match(world.said(), /history: history ignored/);
  });
});

test("a volume is attached, stopped, registered and created, each after the dialog", async () => {
  await withHost(TWO_CACHES, async (world) => {
    const { page, shoot, done, expected } = await open(browser, world.origin, `#/volume/${world.volumes.spare}`);
    // The page asks for the volume while it is not served.
    expected.push("404");
    const dialog = page.getByRole("dialog");
    const confirm = async (name) => {
      assert.equal(await focused(page), "Cancel", name);
      await dialog.getByRole("heading", { name: "What will happen" }).waitFor();
      await isAccessible(page, name);
      await dialog.getByRole("button", { name, exact: true }).click();
      await dialog.waitFor({ state: "hidden" });
    };
    const volume = async (label) => (await world.ask("GET", "/v1/volumes")).volumes.find((v) => v.label === label);

    await page.getByRole("button", { name: "Attach…" }).click();
    await dialog.getByText(/its clients are disconnected/).waitFor();
    await shoot("attach-desktop-light", false);
    await confirm("Attach");
    await until("the attachment", async () => (await volume("spare"))?.attached);
    await page.getByRole("button", { name: "Detach…" }).waitFor();

    // Enter right after the dialog has opened does nothing.
    await page.getByRole("button", { name: "Stop…" }).click();
    await dialog.getByText(/Clients are disconnected/).waitFor();
    await page.keyboard.press("Enter");
    await dialog.waitFor({ state: "hidden" });
    assert.ok(await volume("spare"), "it is served still");
    await page.getByRole("button", { name: "Stop…" }).click();
    await confirm("Stop the volume");
    await until("the stop", async () => !(await volume("spare")));
    await page.goto(`${world.origin}/#/`);
    const stopped = page.getByRole("region", { name: "Stopped devices" });
    await stopped.getByRole("button", { name: "Register spare again" }).click();
    await confirm("Register");
    await until("the volume", async () => (await volume("spare"))?.attached);
    await stopped.waitFor({ state: "hidden" });

    await page.getByRole("region", { name: "Cache optane" }).getByRole("button", { name: "Create a volume…" }).click();
    assert.ok(await dialog.getByRole("button", { name: "Create" }).isDisabled(), "nothing is said yet");
    await dialog.getByLabel("Size").fill("8");
    await dialog.getByLabel("Unit").selectOption("MiB");
    await dialog.getByLabel("Label").fill("scratch");
    await dialog.getByText(/A volume of 8 MiB with the label “scratch”/).waitFor();
    await dialog.getByText(/on the cache device alone/).waitFor();
    await dialog.getByRole("button", { name: "Create", exact: true }).click();
    await dialog.waitFor({ state: "hidden" });
    await until("the volume", async () => (await volume("scratch"))?.size_bytes === 8 << 20);
    await page.getByRole("row", { name: /scratch.*flash-only/ }).waitFor();

    // A flash-only volume is stopped and served again, too; a stopped one stays listed.
    await page.getByRole("row", { name: /scratch.*flash-only/ }).getByRole("link", { name: "scratch" }).click();
    await page.getByRole("button", { name: "Stop…" }).click();
    await dialog.getByText(/served again by “Serve again…”/).waitFor();
    await confirm("Stop the volume");
    await page.locator("main .chip", { hasText: /^stopped$/ }).waitFor();
    assert.equal(await page.getByRole("button", { name: "Stop…" }).isVisible(), false);
    await page.getByRole("button", { name: "Serve again…" }).click();
    await confirm("Serve again");
    await page.locator("main .chip", { hasText: /^flash-only$/ }).waitFor();
    assert.equal((await volume("scratch")).stopped, false);

    // A set with a label is called by it, and not by its device.
    await world.ask("PUT", `/v1/sets/${world.sets.optane}/label`, { label: "fast" });
    await page.getByRole("navigation").getByRole("link", { name: "Cache fast" }).click();
    await page.getByRole("heading", { level: 1, name: "Cache fast" }).waitFor();
    await done();
  });
});

/** Formatting is the one action that destroys data, so the page shows the daemon's own dry run and wants more than a click. */
test("devices are formatted after a dry run, and dirty data by the name of its device alone", async () => {
  await withHost({ caches: [{ name: "nvme", size: 64, volumes: [["mail", 128]] }], alone: [] }, async (world) => {
    const [fast, slow] = [world.device("new-fast", 96), world.device("new-slow", 64)];
    const begin = async (page) => {
      await page.getByRole("button", { name: "Format devices…" }).click();
      const dialog = page.getByRole("dialog");
      await dialog.getByRole("heading", { name: "Format devices" }).waitFor();
      assert.equal(await focused(page), "Cancel");
      return dialog;
    };
    const fill = async (dialog, cache, backing, label = "") => {
      await dialog.getByLabel("Cache device (or none)").fill(cache);
      await dialog.getByLabel("Label of the backing device (or none)").fill(label);
      await dialog.getByLabel("Backing devices (or none)").fill(backing);
      await dialog.getByLabel("Backing devices (or none)").press("Tab");
    };
    for (const viewport of [DESKTOP, PHONE]) {
      for (const colorScheme of ["light", "dark"]) {
        const { page, shoot, done, expected } = await open(browser, world.origin, "", { viewport, colorScheme });
        // The fields are checked one by one.
        expected.push("409", "400");
        // The buttons beside the name of the host do not squeeze it.
        const heading = await page.getByRole("heading", { level: 1 }).boundingBox();
        assert.ok(heading.width >= 100 && heading.height < 40, `a heading of ${heading.width} by ${heading.height} pixels`);
        const dialog = await begin(page);
        await fill(dialog, fast, slow, "films");
        await dialog.getByText(/new-slow: would become a backing device of a new cache set/).waitFor();
        await dialog.getByText(/are lost, and cannot be had back/).waitFor();
        await isAccessible(page, `make ${viewport.width} ${colorScheme}`);
        if (viewport === PHONE) await fitsThePhone(page);
        await shoot(`make-${viewport === PHONE ? "phone" : "desktop"}-${colorScheme}`, false);
        await dialog.getByRole("button", { name: "Cancel" }).click();
        await done();
      }
    }
    assert.ok(fs.readFileSync(fast).every((byte) => byte === 0), "nothing is written");

    const { page, shoot, done, expected } = await open(browser, world.origin, "");
    expected.push("409", "400");
    let dialog = await begin(page);
    const format = dialog.getByRole("button", { name: "Format", exact: true });
    assert.ok(await format.isDisabled(), "nothing is said yet");
    await fill(dialog, world.at("nvme"), slow);
    await dialog.getByText(/Refused: .*nvme: is registered/).waitFor();
    assert.ok(await format.isDisabled());
    await fill(dialog, fast, slow, "films");
    await dialog.getByLabel(/Cache writes, too/).check();
    await dialog.getByText(/would become a cache device/).waitFor();
    await format.click();
    // The next dialog registers them.
    await dialog.getByRole("heading", { name: "Register new-fast and new-slow" }).waitFor();
    await dialog.getByRole("button", { name: "Register", exact: true }).click();
    await dialog.waitFor({ state: "hidden" });
    const films = await until("the volume", async () => (await world.ask("GET", "/v1/volumes")).volumes.find((v) => v.label === "films"));
    assert.equal(films.cache_mode, "writeback");
    world.volumes.films = films.name;
    await world.fill("films", 1);
    for (const device of [fast, slow]) await world.ask("POST", "/v1/unregister", { device });

    // Dirty data: neither box is enough, and the name has to be right.
    dialog = await begin(page);
    await fill(dialog, fast, "");
    await dialog.getByText(/Refused: .*dirty data that exists nowhere else/).waitFor();
    await dialog.getByLabel(/Overwrite devices of bcache/).check();
    await dialog.getByLabel(/Overwrite anything else/).check();
    const lost = dialog.getByLabel("Lose the dirty data of");
    await lost.fill("fast");
    await lost.press("Tab");
    await dialog.getByText(/Refused: .*expected the name of a device that is to be formatted, found "fast"/).waitFor();
    assert.ok(await format.isDisabled());
    await shoot("make-dirty-desktop-light", false);
    await lost.fill("new-fast");
    await lost.press("Tab");
    await dialog.getByText(/dirty data that exists nowhere else: .*: this would be lost/).waitFor();
    assert.ok(await format.isEnabled());
    await dialog.getByRole("button", { name: "Cancel" }).click();
    await done();
  });
});
