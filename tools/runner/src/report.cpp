#include "report.h"

#include "json.h"

namespace edgekit {
namespace {

constexpr std::size_t kMaxMessage = 400;

// Appends `"key":`, after a comma where something stands before.
void append_key(std::string& out, std::string_view key) {
  if (!out.empty() && out.back() != '{') out.push_back(',');
  append_text(out, key);
  out.push_back(':');
}

void append_field(std::string& out, std::string_view key, std::string_view value) {
  append_key(out, key);
  append_text(out, value);
}

void append_field(std::string& out, std::string_view key, double value) {
  append_key(out, key);
  append_number(out, value);
}

void append_state(std::string& out, std::string_view key, const MachineState& state) {
  append_key(out, key);
  out += "{\"temperatures_c\":{";
  for (const auto& [name, degrees] : state.temperatures_c) append_field(out, name, degrees);
  out += "},\"clocks_khz\":{";
  for (const auto& [name, khz] : state.clocks_khz) {
    append_key(out, name);
    out += std::to_string(khz);
  }
  out += "}}";
}

template <typename Items, typename Append>
void append_list(std::string& out, std::string_view key, const Items& items, Append append) {
  append_key(out, key);
  out.push_back('[');
  bool first = true;
  for (const auto& item : items) {
    if (!first) out.push_back(',');
    first = false;
    append(item);
  }
  out.push_back(']');
}

void append_node(std::string& out, const PlacedNode& node, bool node_times) {
  std::string object = "{";
  append_field(object, "name", node.name);
  append_field(object, "op", node.op);
  append_field(object, "domain", node.domain);
  append_field(object, "provider", node.provider);
  if (node_times) append_field(object, "microseconds", node.microseconds);
  out += object + "}";
}

}  // namespace

std::string first_words(const std::string& message) {
  const std::size_t start = message.find_first_not_of(" \t\r\n");
  if (start == std::string::npos) return "no reason given";
  std::string line = message.substr(start, message.find('\n', start) - start);
  if (line.size() > kMaxMessage) line.resize(kMaxMessage);
  return line;
}

std::string format_report(const Report& report, bool node_times) {
  std::string out = "{";
  append_field(out, "status", report.status);
  append_field(out, "message", report.message);
  append_field(out, "load_ms", report.load_ms);
  append_list(out, "latency_ms", report.latency_ms, [&](double value) { append_number(out, value); });
  append_list(out, "elapsed_ms", report.elapsed_ms, [&](double value) { append_number(out, value); });
  append_key(out, "peak_rss_bytes");
  out += std::to_string(peak_rss_bytes());
  append_key(out, "versions");
  std::string versions = "{";
  append_field(versions, "onnxruntime", report.ort_version);
  append_field(versions, "system", system_name());
  out += versions + "}";
  append_list(out, "placement", report.placement, [&](const PlacedNode& node) { append_node(out, node, node_times); });
  append_field(out, "placement_source", report.from_profile ? "profile" : "session");
  append_list(out, "cpu_features", cpu_features(), [&](const std::string& name) { append_text(out, name); });
  append_state(out, "before", report.before);
  append_state(out, "after", report.after);
  append_key(out, "trace_bytes");
  out += std::to_string(report.trace_bytes);
  return out + "}\n";
}

}  // namespace edgekit
