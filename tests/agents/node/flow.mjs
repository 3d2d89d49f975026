// OpenAI's client for Node: URL and model are arguments. Prints what the model called and answered.
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [baseURL, model, question, askForJson, maxTokens] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const common = { model, temperature: 0, parallel_tool_calls: false };
const chat = { ...common, max_tokens: Number(maxTokens) };
const response = { ...common, max_output_tokens: Number(maxTokens) };
const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Bern", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const results = { get_weather: "20 degrees", get_time: "12:30" };
const functions = Object.keys(results).map((name) => ({ name, parameters, strict: true }));
const Weather = z.object({ city: z.enum(["Bern", "Rome"]), degrees: z.number().int().min(0).max(40) });
const form = [{ role: "user", content: `${question} ${askForJson}` }];

async function chatFlow(isStreamed) {
  const tools = functions.map((each) => ({ type: "function", function: each }));
  const messages = [{ role: "user", content: question }];
  const called = [];
  for (const name of [...Object.keys(results), "required", "none"]) {
    const isWord = name === "required" || name === "none";
    const tool_choice = isWord ? name : { type: "function", function: { name } };
    const body = { ...chat, tools, messages, tool_choice };
    const done = isStreamed
      ? await client.chat.completions.stream(body).finalChatCompletion()
      : await client.chat.completions.create(body);
    const { message } = done.choices[0];
    messages.push(message);
    for (const call of message.tool_calls ?? []) {
      called.push([call.function.name, JSON.parse(call.function.arguments)]);
      messages.push({ role: "tool", tool_call_id: call.id, content: results[call.function.name] });
    }
  }
  return { model, called, text: messages.at(-1).content };
}

async function responsesFlow(isStreamed) {
  const tools = functions.map((each) => ({ type: "function", ...each }));
  const input = [{ role: "user", content: question }];
  const called = [];
  let text = "";
  for (const name of [...Object.keys(results), "required", "none"]) {
    const isWord = name === "required" || name === "none";
    const tool_choice = isWord ? name : { type: "function", name };
    const body = { ...response, tools, input, tool_choice };
    const done = isStreamed
      ? await client.responses.stream(body).finalResponse()
      : await client.responses.create(body);
    input.push(...done.output);
    text = done.output_text;
    for (const call of done.output.filter((each) => each.type === "function_call")) {
      called.push([call.name, JSON.parse(call.arguments)]);
      const output = results[call.name];
      input.push({ type: "function_call_output", call_id: call.call_id, output });
    }
  }
  return { model, called, text };
}

async function typed() {
  const completion = await client.chat.completions.parse({
    model,
    temperature: 0,
    messages: form,
    response_format: zodResponseFormat(Weather, "weather"),
  });
  const parsed = await client.responses.parse({
    model,
    temperature: 0,
    input: form,
    text: { format: zodTextFormat(Weather, "weather") },
  });
  return [completion.choices[0].message.parsed, parsed.output_parsed];
}

async function runner() {
  const asked = [];
  const tools = functions.map((each) => ({
    type: "function",
    function: {
      ...each,
      parse: JSON.parse,
      function: ({ city }) => {
        asked.push(city);
        return `20 degrees in ${city}`;
      },
    },
  }));
  const tool_choice = { type: "function", function: { name: "get_weather" } };
  const messages = [{ role: "user", content: question }];
  await client.chat.completions.runTools({ ...chat, tools, messages, tool_choice }).done();
  return asked;
}

const flows = {
  chat: [await chatFlow(false), await chatFlow(true)],
  responses: [await responsesFlow(false), await responsesFlow(true)],
  typed: await typed(),
  runner: await runner(),
};
console.log(JSON.stringify(flows));
