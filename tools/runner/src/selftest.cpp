#include "selftest.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "failure.h"
#include "files.h"
#include "npz.h"
#include "sha256.h"

namespace edgekit {
namespace {

constexpr std::size_t kMaxManifest = std::size_t{16} << 20;

const Json& need(const Json& object, const char* key, Json::Kind kind) {
  const Json* value = object.find(key);
  if (value == nullptr || value->kind != kind) throw Failure(std::string("manifest.json has no '") + key + "'");
  return *value;
}

// Returns the path of a file that the manifest lists, once its digest holds.
std::string checked_file(const Json& manifest, const std::string& bundle, const std::string& name) {
  const bool climbs = name.empty() || name[0] == '/' || ("/" + name + "/").find("/../") != std::string::npos;
  if (climbs) throw Failure(quoted(name) + " is not a safe file name");
  const Json& entry = need(need(manifest, "files", Json::Kind::object), name.c_str(), Json::Kind::object);
  const std::string path = bundle + "/" + name;
  if (digest_file(path) != entry.text_of("sha256")) throw Failure(quoted(name) + " of the bundle was altered");
  return path;
}

Job job_of(const Json& manifest, const Options& options) {
  Job job = options.job;
  if (!options.own_provider) {
    job.provider = manifest.text_of("provider");
    Words given = manifest.words_of("provider_options");
    given.insert(given.end(), job.provider_options.begin(), job.provider_options.end());
    job.provider_options = given;
  }
  for (const auto& [key, value] : manifest.words_of("session_config")) {
    // On the CPU nothing can fall back to it, and ONNX Runtime refuses a session that forbids it.
    if (job.provider != kCpu || key != "session.disable_cpu_ep_fallback") job.session_config.emplace_back(key, value);
  }
  const std::string form = options.form.empty() ? manifest.text_of("form") : options.form;
  const Json& files = need(need(manifest, "forms", Json::Kind::object), form.c_str(), Json::Kind::list);
  for (const Json& file : files.items) {
    const std::string path = checked_file(manifest, options.bundle, file.text);
    if (job.model.empty()) job.model = path;
  }
  if (job.model.empty()) throw Failure("the bundle names no file for form " + quoted(form));
  return job;
}

double half(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 0x1F;
  const double fraction = bits & 0x3FF;
  const double size = exponent == 0    ? std::ldexp(fraction, -24)
                      : exponent == 31 ? (fraction == 0 ? HUGE_VAL : NAN)
                                       : std::ldexp(1024 + fraction, exponent - 25);
  return (bits & 0x8000) != 0 ? -size : size;
}

template <typename T>
T at(const char* data, std::size_t index) {
  T value;
  std::memcpy(&value, data + index * sizeof(T), sizeof(T));
  return value;
}

double element(const Dtype& dtype, const char* data, std::size_t index) {
  if (dtype.onnx == find_dtype("float32")->onnx) return at<float>(data, index);
  if (dtype.onnx == find_dtype("float64")->onnx) return at<double>(data, index);
  return half(at<std::uint16_t>(data, index));
}

// Returns the largest distance of two outputs, infinity where they cannot be compared or a number is none.
double distance(const View& got, const Tensor& wanted) {
  if (got.dtype != wanted.dtype || got.shape != wanted.shape || got.dtype->npy[0] != 'f') return HUGE_VAL;
  double most = 0;
  for (std::size_t index = 0; index < got.size / got.dtype->size; ++index) {
    const double off =
        std::fabs(element(*got.dtype, got.data, index) - element(*wanted.dtype, wanted.bytes.data(), index));
    if (!(off <= most)) most = std::isfinite(off) ? off : HUGE_VAL;
  }
  return most;
}

struct Result {
  std::string lines;
  bool passed = true;
  int judged = 0;
};

void judge(const Json& tolerance, const std::vector<View>& got, Npz& expected, std::int64_t index, std::int64_t row,
           Result& result) {
  for (const View& view : got) {
    const Json* limit = tolerance.find(view.name);
    if (limit == nullptr) continue;
    const auto place = std::find(expected.names().begin(), expected.names().end(), view.name);
    if (place == expected.names().end()) throw Failure("expected.npz has no " + quoted(view.name));
    Tensor wanted;
    expected.read_row(static_cast<std::size_t>(place - expected.names().begin()), index, wanted);
    const double off = distance(view, wanted);
    const bool passed = off <= limit->number;
    result.passed = result.passed && passed;
    ++result.judged;
    result.lines += result.lines.empty() ? "{\"sample\":" : ",{\"sample\":";
    result.lines += std::to_string(row) + ",\"output\":";
    append_text(result.lines, view.name);
    result.lines += ",\"max_abs\":";
    if (std::isfinite(off)) append_number(result.lines, off);
    else result.lines += "null";
    result.lines += ",\"tolerance\":";
    append_number(result.lines, limit->number);
    result.lines += passed ? ",\"passed\":true}" : ",\"passed\":false}";
  }
}

}  // namespace

int test_bundle(const Options& options) {
  const std::string& bundle = options.bundle;
  const Json manifest = parse_json(read_file(bundle + "/manifest.json", kMaxManifest));
  const Json& golden = need(manifest, "golden", Json::Kind::object);
  const Json* chosen = golden.find("chosen");
  if (chosen == nullptr || chosen->kind != Json::Kind::list || chosen->items.empty()) {
    throw Failure("the bundle has no self-test: build it again");
  }
  const Json& tolerance = need(golden, "tolerance", Json::Kind::object);
  const Job job = job_of(manifest, options);
  Npz inputs(checked_file(manifest, bundle, "golden/inputs.npz"));
  Npz expected(checked_file(manifest, bundle, "golden/expected.npz"));
  const Ort ort(job.runtime);
  Session session(ort, job);
  std::vector<Tensor> sample(inputs.names().size());
  Result result;
  for (std::size_t index = 0; index < chosen->items.size(); ++index) {
    const std::int64_t row = chosen->items[index].whole_of("row", -1);
    for (std::size_t input = 0; input < sample.size(); ++input) inputs.read_row(input, row, sample[input]);
    session.bind(sample);
    session.run();
    judge(tolerance, session.views(), expected, static_cast<std::int64_t>(index), row, result);
  }
  if (result.judged == 0) throw Failure("the bundle's self-test judges no output");
  std::string text = "{\"bundle\":";
  append_text(text, manifest.text_of("name") + "-" + manifest.text_of("target"));
  text += ",\"provider\":";
  append_text(text, job.provider);
  text += ",\"onnxruntime\":";
  append_text(text, ort.version());
  text += result.passed ? ",\"passed\":true" : ",\"passed\":false";
  text += ",\"results\":[" + result.lines + "]}\n";
  std::fputs(text.c_str(), stdout);
  return result.passed ? 0 : 1;
}

}  // namespace edgekit
