// Tests the dashboard on hosts in trouble, on a host with many volumes, over a restart, and what it does to devices and volumes.

import assert from "node:assert/strict";
import fs from "node:fs";
import { after, before, test } from "node:test";

import { DESKTOP, PHONE, drawn, fitsThePhone, focused, isAccessible, launch, open } from "./page.mjs";
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

/** Screenshots of a page in both sizes, each in its theme, with the checks that hold for all. */
async function look(world, name, where, ready) {
  for (const [size, viewport, colorScheme] of [["desktop", DESKTOP, "light"], ["phone", PHONE, "dark"]]) {
    const { page, shoot, done } = await open(browser, world.origin, where, { viewport, colorScheme });
    await ready(page);
    if (viewport === PHONE) await fitsThePhone(page);
    await isAccessible(page, `${name} ${size}`);
    await shoot(`${name}-${size}-${colorScheme}`);
    await done();
  }
}

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
    });

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
      await page.getByRole("region", { name: "Problems" }).getByRole("heading", { name: "Cache nvme has failed" }).waitFor();
      await page.getByText(/Requests to mail fail: their newest data is on the cache device/).waitFor();
      await page.getByRole("region", { name: "Cache nvme" }).locator(".chip", { hasText: "requests fail" }).waitFor();
      // The volumes of the other cache and without a cache are as before.
      await page.getByRole("region", { name: "Cache optane" }).locator(".chip", { hasText: "serving" }).waitFor();
    });
    world.broken = true;
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

test("24 volumes are found by their labels", async () => {
  const labels = Array.from({ length: 24 }, (_, n) => `vm-${n + 1}`);
  await withHost({ caches: [{ name: "nvme", size: 192, volumes: labels.map((label) => [label, 16]) }], alone: [] }, async (world) => {
    await world.fill("vm-2", 2);
    await look(world, "many", "", async (page) => {
      const table = page.getByRole("region", { name: "Cache nvme" }).getByRole("table");
      await until("all volumes", async () => (await table.getByRole("link").count()) === 24);
      // In the order of people, not of characters, and without the numbers of the daemon.
      assert.deepEqual((await table.getByRole("link").allTextContents()).slice(0, 3), ["vm-1", "vm-2", "vm-3"]);
    });
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
    await done();
  });
});
