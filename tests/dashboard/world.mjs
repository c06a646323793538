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

/** Waits for a condition, at most a minute. */
export async function until(what, condition) {
  const deadline = Date.now() + 60_000;
  for (;;) {
    const value = await condition();
    if (value) return value;
    if (Date.now() > deadline) throw new Error(`${what} does not come about`);
    await new Promise((done) => setTimeout(done, 50));
  }
}

export class World {
  static async start() {
    const world = new World();
    world.program = needed("UBCACHE");
    world.dir = fs.mkdtempSync(path.join(os.tmpdir(), "ubcache-dashboard-"));
    const at = (name) => path.join(world.dir, name);
    const device = (name, size) => {
      fs.closeSync(fs.openSync(at(name), "w"));
      fs.truncateSync(at(name), size);
      return at(name);
    };
    const [fast, slow, other, alone] = [device("nvme", 192 * MIB), device("archive-disk", 1024 * MIB), device("mail-disk", 512 * MIB), device("spare-disk", 128 * MIB)];
    await run(world.program, ["make", "-C", fast, "-B", slow, "--bucket", "128k", "--writeback", "--label", "archive"]);
    const set = /[0-9a-f]{8}-[0-9a-f-]{27}/;
    await run(world.program, ["make", "-B", other, "--label", "mail"]);
    await run(world.program, ["make", "-B", alone, "--label", "spare"]);
    world.socket = at("control.sock");
    fs.writeFileSync(at("ubcache.toml"), `exports = ["nbd=${world.dir}/{volume}.sock"]\n`);
    world.log = fs.openSync(at("daemon.log"), "a");
    const args = ["daemon", "--config", at("ubcache.toml"), "--socket", world.socket, "--state-dir", at("state")];
    world.daemon = spawn(world.program, args, { stdio: ["ignore", "ignore", world.log] });
    await until("the daemon", () => fs.existsSync(world.socket) && world.said().includes("ready"));
    await world.ask("POST", "/v1/register", { devices: [fast, slow, other, alone] });
    world.set = set.exec(JSON.stringify((await world.ask("GET", "/v1/sets")).sets.find((s) => s.has_cache).id))[0];
    await world.ask("POST", "/v1/attach", { cache: world.set, backing: other });
    world.volumes = {};
    for (const v of (await world.ask("GET", "/v1/volumes")).volumes) world.volumes[v.label] = v.name;
    await world.listen();
    return world;
  }

  said() {
    return fs.readFileSync(path.join(this.dir, "daemon.log"), "utf8");
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

  async end() {
    this.bridge?.close();
    const gone = new Promise((done) => this.daemon.once("exit", (code) => done(code)));
    this.daemon.kill("SIGTERM");
    const code = await gone;
    const said = this.said();
    fs.rmSync(this.dir, { recursive: true, force: true });
    if (code !== 0 || said.includes("panicked")) throw new Error(`the daemon ended with ${code}: ${said}`);
  }
}
