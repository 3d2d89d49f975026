// Streams one generation: node index.js [--inference HOST:PORT] [--adapter REF] [--tenant TENANT] TEXT
// LOADOUT_TOKEN or --token-file has the bearer token; --tls-ca-file, --tls-cert-file and --tls-key-file are PEM files.
"use strict";

const fs = require("node:fs");
const path = require("node:path");
const { parseArgs } = require("node:util");
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

const PROTOS = path.join(__dirname, "..", "..", "protos");

// A dead peer looks like one of these: directly, through Envoy or nginx, and through HAProxy.
const STREAM_LOST = [grpc.status.UNAVAILABLE, grpc.status.INTERNAL, grpc.status.UNKNOWN];

// Without TLS a token goes to this machine only.
const LOOPBACK = /^(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?$/;

function connect(address, credentials, isSecure) {
  const definition = protoLoader.loadSync("loadout/inference/v1/inference.proto", {
    includeDirs: [PROTOS],
    keepCase: true, // field names as the contract writes them
    longs: String, // JavaScript's numbers cannot hold every uint64
    enums: String,
  });
  const { InferenceService } = grpc.loadPackageDefinition(definition).loadout.inference.v1;
  // A proxy of the environment would read a token that travels without TLS.
  const options = isSecure ? {} : { "grpc.enable_http_proxy": 0 };
  return new InferenceService(address, credentials, options);
}

function tlsCredentials({ "tls-ca-file": ca, "tls-cert-file": cert, "tls-key-file": key }) {
  const read = (file) => (file ? fs.readFileSync(file) : null);
  return grpc.credentials.createSsl(read(ca), read(key), read(cert));
}

// The metadata that shows who calls; empty without a token.
function identity(tokenFile, address, isSecure) {
  const token = tokenFile ? fs.readFileSync(tokenFile, "utf8").trim() : process.env.LOADOUT_TOKEN;
  const metadata = new grpc.Metadata();
  if (!token) return metadata;
  if (!isSecure && !LOOPBACK.test(address)) {
    throw new Error(`${address} would be sent the token without TLS: pass --tls-ca-file`);
  }
  metadata.set("authorization", `Bearer ${token}`);
  return metadata;
}

// What proxies keep an adapter's calls together by: "tenant/name" without version, or the digest.
// A name without a tenant means the token's first one, which a client has to be told.
function adapterKey(ref, tenant) {
  if (ref.startsWith("sha256:")) return ref;
  const name = ref.split("@")[0];
  return name.includes("/") ? name : `${tenant}/${name}`;
}

async function generate(client, request, metadata, onText) {
  const stream = client.Generate(request, metadata, { deadline: Date.now() + 60_000 });
  let last;
  for await (const response of stream) {
    onText(response.text);
    last = response;
  }
  return last;
}

async function main() {
  const { values, positionals } = parseArgs({
    allowPositionals: true,
    options: {
      inference: { type: "string", default: process.env.LOADOUT_INFERENCE ?? "127.0.0.1:7080" },
      adapter: { type: "string", default: "" },
      tenant: { type: "string", default: process.env.LOADOUT_TENANT ?? "default" },
      "max-tokens": { type: "string", default: "64" },
      "token-file": { type: "string" },
      "tls-ca-file": { type: "string" },
      "tls-cert-file": { type: "string" },
      "tls-key-file": { type: "string" },
    },
  });
  const isSecure = Boolean(values["tls-ca-file"] || values["tls-cert-file"] || values["tls-key-file"]);
  const credentials = isSecure ? tlsCredentials(values) : grpc.credentials.createInsecure();
  const metadata = identity(values["token-file"], values.inference, isSecure);
  if (values.adapter) metadata.set("x-adapter-id", adapterKey(values.adapter, values.tenant));
  const client = connect(values.inference, credentials, isSecure);
  const request = {
    text: positionals.join(" "),
    adapter: values.adapter,
    sampling: { temperature: 0, max_tokens: Number(values["max-tokens"]) },
  };
  try {
    const last = await generate(client, request, metadata, (text) => process.stdout.write(text));
    const { prompt_tokens, completion_tokens } = last.usage;
    process.stdout.write("\n");
    console.error(`${last.finish_reason}: ${prompt_tokens} + ${completion_tokens} tokens`);
  } finally {
    client.close();
  }
}

main().catch((error) => {
  const lost = STREAM_LOST.includes(error.code) ? " (stream lost: try again)" : "";
  console.error(`${error.details ?? error.message}${lost}`);
  process.exitCode = 1;
});
