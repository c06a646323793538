// A small NBD client: one request at a time, over a Unix socket, with the part of the protocol that the tests of the dashboard need.

import net from "node:net";

const [READ, WRITE, FLUSH] = [0, 1, 3];

/** Reads the given number of bytes from a stream. */
class Reader {
  constructor(socket) {
    this.have = Buffer.alloc(0);
    this.waits = null;
    socket.on("data", (data) => {
      this.have = Buffer.concat([this.have, data]);
      this.serve();
    });
    socket.on("close", () => this.waits?.failed(new Error("the server hung up")));
  }

  serve() {
    if (this.waits && this.have.length >= this.waits.size) {
      const { size, done } = this.waits;
      this.waits = null;
      const taken = this.have.subarray(0, size);
      this.have = this.have.subarray(size);
      done(taken);
    }
  }

  take(size) {
    return new Promise((done, failed) => {
      this.waits = { size, done, failed };
      this.serve();
    });
  }
}

export async function connect(path, name) {
  const socket = net.connect(path);
  await new Promise((done, failed) => socket.once("connect", done).once("error", failed));
  const reader = new Reader(socket);
  const greeting = await reader.take(18);
  if (greeting.toString("latin1", 0, 16) !== "NBDMAGICIHAVEOPT") throw new Error("no NBD server");
  const wanted = Buffer.from(name);
  const hello = Buffer.alloc(20);
  hello.writeUInt32BE(3, 0); // fixed newstyle, no zeroes
  hello.write("IHAVEOPT", 4, "latin1");
  hello.writeUInt32BE(1, 12); // NBD_OPT_EXPORT_NAME
  hello.writeUInt32BE(wanted.length, 16);
  socket.write(Buffer.concat([hello, wanted]));
  const size = Number((await reader.take(10)).readBigUInt64BE(0));
  let cookie = 0n;

  async function ask(kind, offset, length, data) {
    const head = Buffer.alloc(28);
    head.writeUInt32BE(0x25609513, 0);
    head.writeUInt16BE(kind, 6);
    head.writeBigUInt64BE(++cookie, 8);
    head.writeBigUInt64BE(BigInt(offset), 16);
    head.writeUInt32BE(length, 24);
    socket.write(data ? Buffer.concat([head, data]) : head);
    const reply = await reader.take(16);
    if (reply.readUInt32BE(0) !== 0x67446698 || reply.readBigUInt64BE(8) !== cookie) throw new Error("no reply of NBD");
    const error = reply.readUInt32BE(4);
    if (error) throw new Error(`NBD error ${error}`);
    return kind === READ ? reader.take(length) : null;
  }

  return {
    size,
    read: (offset, length) => ask(READ, offset, length),
    write: (offset, data) => ask(WRITE, offset, data.length, data),
    flush: () => ask(FLUSH, 0, 0),
    end: () => socket.destroy(),
  };
}
