// The request of the page as a command and as a program.

const LONGEST_COMMAND = 8000;

const NUMPY = {
  BOOL: "np.bool_",
  FP16: "np.float16",
  BF16: "ml_dtypes.bfloat16",
  FP32: "np.float32",
  FP64: "np.float64",
  BYTES: "np.object_",
};

function numpyType(datatype) {
  return NUMPY[datatype] ?? `np.${datatype.toLowerCase()}`;
}

/** Return the infer path of a version. */
export function inferPath(name, version) {
  const model = `/v2/models/${encodeURIComponent(name)}`;
  return version ? `${model}/versions/${version}/infer` : `${model}/infer`;
}

/** Return the address of the server, as tritonclient takes it: host and port, with the path of the page if a proxy adds one. */
function addressOf(location) {
  return location.host + location.pathname.replace(/\/[^/]*$/, "");
}

function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

/** Return a text for a shell, quoted if it needs that. */
function shellText(text) {
  return /^[\w.:/%~-]+$/.test(text) ? text : quoted(text);
}

/** Return the request as a curl command, which reads a long body from a file. */
export function curlCommand(location, path, body, needsKey) {
  const lines = [`curl -s ${shellText(`${location.protocol}//${addressOf(location)}${path}`)}`];
  if (needsKey) lines.push(`-H "Authorization: Bearer $KEY"`);
  lines.push(body.length > LONGEST_COMMAND ? "--data-binary @request.json" : `-d ${quoted(body)}`);
  return lines.join(" \\\n  ");
}

/** Return a text as a Python literal. The escapes of JSON are valid in Python. */
function pythonText(text) {
  return JSON.stringify(text);
}

function pythonToken(token) {
  return { true: "True", false: "False" }[token] ?? token;
}

/** Return the request as a Python program that uses tritonclient. */
export function pythonProgram(location, name, version, inputs, outputs, parameters, needsKey) {
  const isSecure = location.protocol === "https:";
  const lines = ["import numpy as np", "import tritonclient.http as triton", ""];
  if (inputs.some(({ tensor }) => tensor.datatype === "BF16")) lines.unshift("import ml_dtypes");
  lines.push(`client = triton.InferenceServerClient(${pythonText(addressOf(location))}${isSecure ? ", ssl=True" : ""})`);
  lines.push("inputs = []");
  for (const { tensor, shape, tokens } of inputs) {
    const first = tokens[0];
    const isFilled = tokens.length > 64 && tokens.every((token) => token === first);
    const type = numpyType(tensor.datatype);
    const values = isFilled
      ? `np.full((${shape.join(", ")},), ${pythonToken(first)}, ${type})`
      : `np.array([${tokens.map(pythonToken).join(", ")}], ${type}).reshape(${shape.length ? shape.join(", ") : "()"})`;
    lines.push(`tensor = ${values}`);
    const named = `${pythonText(tensor.name)}, tensor.shape, ${pythonText(tensor.datatype)}`;
    lines.push(`inputs.append(triton.InferInput(${named}))`, "inputs[-1].set_data_from_numpy(tensor)");
  }
  const more = Object.entries(parameters).map(([key, value]) => `, ${key}=${pythonToken(JSON.stringify(value))}`);
  if (version) more.push(`, model_version=${pythonText(version)}`);
  if (needsKey) more.push(`, headers={"Authorization": "Bearer KEY"}`);
  lines.push(`result = client.infer(${pythonText(name)}, inputs${more.join("")})`);
  for (const { name: output } of outputs) lines.push(`print(${pythonText(output)}, result.as_numpy(${pythonText(output)}))`);
  return lines.join("\n");
}
