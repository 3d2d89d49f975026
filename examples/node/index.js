// Streams one generation: node index.js [--inference HOST:PORT] [--adapter REF] TEXT
"use strict";

const path = require("node:path");
const { parseArgs } = require("node:util");
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

const PROTOS = path.join(__dirname, "..", "..", "protos");

// A dead peer looks like one of these: directly, through Envoy or nginx, and through HAProxy.
const STREAM_LOST = [grpc.status.UNAVAILABLE, grpc.status.INTERNAL, grpc.status.UNKNOWN];

function connect(address) {
  const definition = protoLoader.loadSync("loadout/inference/v1/inference.proto", {
    includeDirs: [PROTOS],
    keepCase: true, // field names as the contract writes them
    longs: String, // JavaScript's numbers cannot hold every uint64
    enums: String,
  });
  const { InferenceService } = grpc.loadPackageDefinition(definition).loadout.inference.v1;
  return new InferenceService(address, grpc.credentials.createInsecure());
}

async function generate(client, request, onText) {
  const stream = client.Generate(request, { deadline: Date.now() + 60_000 });
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
      "max-tokens": { type: "string", default: "64" },
    },
  });
  const client = connect(values.inference);
  const request = {
    text: positionals.join(" "),
    adapter: values.adapter,
    sampling: { temperature: 0, max_tokens: Number(values["max-tokens"]) },
  };
  try {
    const last = await generate(client, request, (text) => process.stdout.write(text));
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
