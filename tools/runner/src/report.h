// What the runner says of a run: edgekit's FarRun, see edgekit/devices/process/exchange.py.
#pragma once

#include <string>
#include <vector>

#include "machine.h"
#include "session.h"

namespace edgekit {

struct Report {
  std::string status = "running";
  std::string message;
  double load_ms = 0;
  std::vector<double> latency_ms;
  std::vector<double> elapsed_ms;  // of a sample's runs together, where several ran at once
  std::string ort_version;
  std::vector<PlacedNode> placement;
  bool from_profile = false;
  MachineState before;
  MachineState after;
  int trace = -1;                  // the profiler's file, open, where the job asked for it
  std::int64_t trace_bytes = 0;
};

// Returns the report as JSON in one line; `node_times` adds how long each node took.
std::string format_report(const Report& report, bool node_times = false);

// Returns the first line of a message that says something, at most 400 bytes of it.
std::string first_words(const std::string& message);

}  // namespace edgekit
