// Ask a reference server for log-probs, in plain JavaScript. The wire is described in docs/protocol.md.
//
//   node examples/client.mjs http://127.0.0.1:59875         (Node 18 or newer; GRPO_REF_TOKEN, if the server has one)

const url = process.argv[2] ?? "http://127.0.0.1:59875";

// safetensors: eight bytes of header length, a JSON header that says where each tensor lies, the numbers.
function encode(tensors, metadata) {
  const header = { __metadata__: metadata };
  let end = 0;
  for (const [name, numbers] of Object.entries(tensors)) {
    header[name] = { dtype: "I32", shape: [numbers.length], data_offsets: [end, (end += 4 * numbers.length)] };
  }
  const text = Buffer.from(JSON.stringify(header));
  const body = Buffer.alloc(8 + text.length + end);
  body.writeBigUInt64LE(BigInt(text.length));
  let place = 8 + text.copy(body, 8);
  for (const number of Object.values(tensors).flat()) place = body.writeInt32LE(number, place);
  return body;
}

function decode(body) {
  const start = 8 + Number(body.readBigUInt64LE());
  const { __metadata__: metadata, logprobs } = JSON.parse(body.subarray(8, start));
  const at = (index) => body.readFloatLE(start + logprobs.data_offsets[0] + 4 * index);
  return { metadata, logprobs: Array.from({ length: logprobs.shape[0] }, (_, index) => at(index)) };
}

const request = encode(
  { input_ids: [9, 8, 7, 6, 9, 8, 5], prompt_lengths: [2, 2], completion_lengths: [2, 1] }, // 9 8 with 7 6, and with 5
  { temperature: "1.0", request_id: "first" },
);
const token = process.env.GRPO_REF_TOKEN;
const headers = token ? { Authorization: `Bearer ${token}` } : {};
const answer = await fetch(`${url}/v1/logprobs`, { method: "POST", body: request, headers });
if (answer.ok) {
  console.log(decode(Buffer.from(await answer.arrayBuffer())).logprobs); // three numbers: of 7, 6 and 5
} else {
  const { code, message } = (await answer.json()).error; // 503 says in Retry-After when to come back
  console.error(`${answer.status} ${code}: ${message}`);
  process.exitCode = 1;
}
