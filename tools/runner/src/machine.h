// What the machine tells of itself.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace edgekit {

// Sensors in degrees Celsius and CPUs in kHz; empty where the system does not tell.
struct MachineState {
  std::vector<std::pair<std::string, double>> temperatures_c;
  std::vector<std::pair<std::string, std::int64_t>> clocks_khz;
};

MachineState read_state();
std::vector<std::string> cpu_features();
std::string system_name();
std::int64_t peak_rss_bytes();

}  // namespace edgekit
