// Shared by the tests: a real daemon on files, a connection from TCP to its socket, requests of clients.

import { execFile, spawn } from "node:child_process";
import fs from "node:fs";
import http from "node:http";
import net from "node:net";
import os from "node:os";
import path from "node:path";
import { promisify } from "node:util";

import { connect } from "./nbd.mjs";

const run = promisify(execFile);
const MIB = 1 << 20;

export function needed(name) {
  const value = process.env[name];
  if (!value) throw new Error(`${name} is not set: start the tests by scripts/dashboard-test`);
  return value;
}

/** Waits for a condition, at most a minute if nothing else is said. */
export async function until(what, condition, ms = 60_000) {
  const deadline = Date.now() + ms;
  for (;;) {
    const value = await condition();
    if (value) return value;
    if (Date.now() > deadline) throw new Error(`${what} does not come about`);
    await new Promise((done) => setTimeout(done, 50));
  }
}

/** The usual host: a cache with two volumes, and a volume without a cache. Sizes in MiB. */
export const USUAL = {
  caches: [{ name: "nvme", size: 192, volumes: [["archive", 1024], ["mail", 512]] }],
  alone: [["spare", 128]],
};

export class World {
  /** Starts a daemon that serves what a plan names. Volumes of a cache are in writeback mode. */
  static async start(plan = USUAL) {
    const world = new World();
    world.program = needed("UBCACHE");
    world.dir = fs.mkdtempSync(path.join(os.tmpdir(), "ubcache-dashboard-"));
    world.socket = world.at("control.sock");
    fs.writeFileSync(world.at("ubcache.toml"), `exports = ["nbd=${world.dir}/{volume}.sock"]\n${plan.config ?? ""}`);
    world.log = fs.openSync(world.at("daemon.log"), "a");
    for (const cache of plan.caches) {
      const [[first, size], ...others] = cache.volumes;
      await world.make("-C", world.device(cache.name, cache.size), "-B", world.device(`${first}-disk`, size), "--bucket", "128k", "--writeback", "--label", first, ...(plan.checksums ? ["--checksums"] : []));
      for (const [label, size] of others) await world.make("-B", world.device(`${label}-disk`, size), "--writeback", "--label", label);
    }
    if (plan.group) await world.makeGroup(plan.group);
    for (const [label, size] of plan.alone) await world.make("-B", world.device(`${label}-disk`, size), "--label", label);
    await world.run();
    world.sets = {};
    for (const cache of plan.caches) {
      await world.register(cache.name, ...cache.volumes.map(([label]) => `${label}-disk`));
      world.sets[cache.name] = (await world.ask("GET", "/v1/devices")).devices.find((d) => d.path === world.at(cache.name)).set;
      for (const [label] of cache.volumes.slice(1)) {
        await world.ask("POST", "/v1/attach", { cache: world.sets[cache.name], backing: world.at(`${label}-disk`) });
      }
    }
    if (plan.group) await world.registerGroup(plan.group);
    if (plan.alone.length) await world.register(...plan.alone.map(([label]) => `${label}-disk`));
    world.set = Object.values(world.sets)[0];
    world.volumes = {};
    for (const v of (await world.ask("GET", "/v1/volumes")).volumes) world.volumes[v.label] = v.name;
    await world.listen();
    return world;
  }

  at(name) {
    return path.join(this.dir, name);
  }

  /** A file of so many MiB that is used as a device. */
  device(name, size) {
    fs.closeSync(fs.openSync(this.at(name), "w"));
    fs.truncateSync(this.at(name), size * MIB);
    return this.at(name);
  }

  make(...args) {
    return run(this.program, ["make", ...args]);
  }

  /** Formats the cache devices of a group, `caches`, with the disks of its `volumes`, which belong to them in turn. */
  makeGroup({ caches, volumes, checksums }) {
    const devices = [...caches.flatMap(([name, size]) => ["-C", this.device(name, size)]), ...volumes.flatMap(([label, size]) => ["-B", this.device(`${label}-disk`, size)])];
    return this.make(...devices, "--bucket", "128k", "--writeback", ...(checksums ? ["--checksums"] : []));
  }

  /** Registers a group, gives its volumes their labels, and waits until all dirty data has two copies. */
  async registerGroup({ caches, volumes }) {
    await this.register(...caches.map(([name]) => name), ...volumes.map(([label]) => `${label}-disk`));
    const { devices } = await this.ask("GET", "/v1/devices");
    for (const [name] of caches) this.sets[name] = devices.find((d) => d.path === this.at(name)).set;
    for (const [label] of volumes) {
      const { name } = devices.find((d) => d.path === this.at(`${label}-disk`));
      await this.ask("PUT", `/v1/volumes/${name}/label`, { label });
    }
    await until("two copies", async () => (await this.copies()).every((copy) => copy.complete));
  }

  /** The figures of the second copies of all volumes of groups. */
  async copies() {
    const { volumes } = await this.ask("GET", "/v1/volumes");
    return volumes.map((v) => v.copy).filter(Boolean);
  }

  register(...names) {
    return this.ask("POST", "/v1/register", { devices: names.map((name) => this.at(name)) });
  }

  /** Starts the daemon. It serves what was registered with it before. */
  async run() {
    const before = this.said().length;
    const args = ["daemon", "--config", this.at("ubcache.toml"), "--socket", this.socket, "--state-dir", this.at("state")];
    this.daemon = spawn(this.program, args, { stdio: ["ignore", "ignore", this.log] });
    await until("the daemon", () => fs.existsSync(this.socket) && this.said().slice(before).includes("ready"));
  }

  /** Stops the daemon; returns its exit code. */
  async stop() {
    const gone = new Promise((done) => this.daemon.once("exit", (code) => done(code)));
    this.daemon.kill("SIGTERM");
    return gone;
  }

  said() {
    return fs.readFileSync(this.at("daemon.log"), "utf8");
  }

  /** Sends a request over the Unix socket. */
  async ask(method, where, body, headers = {}) {
    const { status, text } = await this.raw(method, where, body, headers);
    const value = JSON.parse(text);
    if (status >= 400) throw Object.assign(new Error(`${method} ${where}: ${value.error}`), { status });
    return value;
  }

  raw(method, where, body, headers = {}) {
    return new Promise((done, failed) => {
      const request = http.request({ socketPath: this.socket, method, path: where, headers }, (answer) => {
        let text = "";
        answer.setEncoding("utf8").on("data", (part) => (text += part)).on("end", () => done({ status: answer.statusCode, text, headers: answer.headers }));
      });
      request.on("error", failed);
      request.end(body === undefined ? undefined : JSON.stringify(body));
    });
  }

  /** Forwards connections to a port of this host to the control socket, as `ssh -L` does. */
  async listen() {
    this.bridge = net.createServer((from) => {
      const to = net.connect(this.socket);
      from.pipe(to).pipe(from);
      const end = () => (from.destroy(), to.destroy());
      from.on("error", end).on("close", end);
      to.on("error", end).on("close", end);
    });
    await new Promise((done) => this.bridge.listen(0, "127.0.0.1", done));
    this.origin = `http://127.0.0.1:${this.bridge.address().port}`;
  }

  /** Forwards a port like the daemon's own over TCP: all requests but those for the page's files need a token. */
  async guarded(token) {
    const server = http.createServer((request, answer) => {
      const page = request.url === "/" || request.url.startsWith("/assets/");
      if (!page && request.headers.authorization !== `Bearer ${token}`) {
        answer.writeHead(401, { "Content-Type": "application/json" });
        answer.end('{"schema_version": 1, "error": "this needs the token of the daemon"}');
        return;
      }
      const { url, method, headers } = request;
      const on = http.request({ socketPath: this.socket, path: url, method, headers }, (said) => {
        answer.writeHead(said.statusCode, said.headers);
        said.pipe(answer);
      });
      on.on("error", () => answer.destroy());
      answer.on("close", () => on.destroy());
      request.pipe(on);
    });
    await new Promise((done) => server.listen(0, "127.0.0.1", done));
    return { origin: `http://127.0.0.1:${server.address().port}`, end: () => (server.closeAllConnections(), server.close()) };
  }

  /** Clients that run until they are stopped: a stream, reads and writes of hot and of cold places, flushes. */
  work() {
    let state = 88172645463325252n;
    const next = (below) => {
      state ^= (state << 13n) & 0xffffffffffffffffn;
      state ^= state >> 7n;
      state ^= (state << 17n) & 0xffffffffffffffffn;
      return Number(state % BigInt(below));
    };
    const going = { stop: false };
    const pause = (ms) => new Promise((done) => setTimeout(done, ms));
    const client = async (label, what) => {
      const nbd = await connect(path.join(this.dir, `${this.volumes[label]}.sock`), this.volumes[label]);
      for (let n = 0; !going.stop; n++) await what(nbd, n);
      nbd.end();
    };
    const block = Buffer.alloc(64 << 10, 0x5a);
    const hot = () => next(6000) * 4096 + 100 * MIB;
    const parts = [
      client("archive", async (nbd, n) => {
        await nbd.read(hot(), 4096);
        if (n % 9 === 0) await nbd.read(next(nbd.size / 4096 - 1) * 4096, 4096);
        await pause(n % 300 > 240 ? 12 : 3);
      }),
      client("archive", async (nbd, n) => {
        await nbd.write(hot() + next(3) * 200 * MIB, block.subarray(0, 4096 << next(3)));
        if (n % 40 === 39) await nbd.flush();
        await pause(n % 400 > 250 ? 3 : 8);
      }),
      client("archive", async (nbd, n) => {
        await nbd.write(((n * block.length) % (150 * MIB)) + 700 * MIB, block);
        await pause(25);
      }),
      client("mail", async (nbd, n) => {
        await nbd.write(next(2000) * 8192, block.subarray(0, 8192));
        await nbd.read(next(4000) * 8192, 8192);
        if (n % 5 === 4) await nbd.flush();
        await pause(15);
      }),
      client("spare", async (nbd) => {
        await nbd.read(next(nbd.size / 4096 - 1) * 4096, 4096);
        await pause(60);
      }),
    ];
    return async () => {
      going.stop = true;
      await Promise.all(parts);
    };
  }

  /** One client for each of these volumes, until they are stopped. A client that fails ends, and the stop throws its error. */
  busy(labels) {
    let going = true;
    const errors = [];
    const pause = (ms) => new Promise((done) => setTimeout(done, ms));
    const block = Buffer.alloc(16 << 10, 0x5a);
    const client = async (label, nr) => {
      const nbd = await connect(this.at(`${this.volumes[label]}.sock`), this.volumes[label]);
      try {
        for (let n = 0; going; n++) {
          // The same places again and again, now and then another one; some clients do more than others.
          const at = (n % 11 ? (n * 37) % 64 : (n * 101) % 512) * block.length;
          await nbd.read(at, 4096);
          if (n % 3 === 0) await nbd.write((at + (nr % 5) * (1 << 20)) % (nbd.size - block.length), block.subarray(0, 4096 << (n % 3)));
          if (n % 60 === 59) await nbd.flush();
          await pause(8 + 12 * (nr % 4) + (n % 200 > 140 ? 20 : 0));
        }
      } finally {
        nbd.end();
      }
    };
    const failed = (label) => (e) => errors.push(new Error(`client of ${label}: ${e.message}`, { cause: e }));
    const clients = labels.map((label, nr) => client(label, nr).catch(failed(label)));
    return async () => {
      going = false;
      await Promise.all(clients);
      if (errors.length) throw errors[0];
    };
  }

  /** Waits until the history of the host has so many samples. */
  samples(count) {
    return until(`${count} samples`, async () => ((await this.ask("GET", "/v1/history")).columns?.time_ms ?? []).length >= count, 120_000);
  }

  /** Writes and flushes so many MiB of a volume. */
  async fill(label, mib) {
    const nbd = await connect(this.at(`${this.volumes[label]}.sock`), this.volumes[label]);
    const block = Buffer.alloc(64 << 10, 7);
    for (let n = 0; n < mib * 16; n++) await nbd.write(n * block.length, block);
    await nbd.flush();
    nbd.end();
  }

  /** Reads so many MiB of a volume. */
  async read(label, mib) {
    const nbd = await connect(this.at(`${this.volumes[label]}.sock`), this.volumes[label]);
    try {
      for (let n = 0; n < mib * 16; n++) await nbd.read(n << 16, 64 << 10);
    } finally {
      nbd.end();
    }
  }

  /** Damages the superblock of a device that is not served. */
  overwrite(name, offset) {
    const file = fs.openSync(this.at(name), "r+");
    fs.writeSync(file, Buffer.alloc(4096, 0xee), 0, 4096, offset);
    fs.closeSync(file);
  }

  /** Changes a byte of the data that `fill` wrote to a cache device that is not served. */
  damage(name) {
    const file = fs.openSync(this.at(name), "r+");
    const block = Buffer.alloc(4096);
    for (let at = 0; fs.readSync(file, block, 0, block.length, at) === block.length; at += block.length) {
      if (!block.every((byte) => byte === 7)) continue;
      fs.writeSync(file, Buffer.from([8]), 0, 1, at);
      break;
    }
    fs.closeSync(file);
  }

  async end() {
    this.bridge?.close();
    const code = await this.stop();
    const said = this.said();
    fs.rmSync(this.dir, { recursive: true, force: true });
    // A cache that has failed cannot be stopped without an error.
    if ((code !== 0 && !this.broken) || said.includes("panicked")) throw new Error(`the daemon ended with ${code}: ${said}`);
  }
}
