#include "machine.h"

#include <sys/resource.h>
#include <sys/utsname.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#if defined(__aarch64__)
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#endif

namespace edgekit {
namespace {

constexpr int kMaxSensors = 256;

std::string first_line(const std::string& path) {
  char line[256] = "";
  if (std::FILE* file = std::fopen(path.c_str(), "re")) {
    if (std::fgets(line, sizeof line, file) == nullptr) line[0] = '\0';
    std::fclose(file);
  }
  line[std::strcspn(line, "\r\n")] = '\0';
  return line;
}

#if defined(__aarch64__)
struct Bit {
  unsigned long kind;
  unsigned place;
  const char* name;
};
// The bits of the kernel's interface to user programs, arch/arm64/include/uapi/asm/hwcap.h.
constexpr Bit kBits[] = {
    {AT_HWCAP, 1, "asimd"},   {AT_HWCAP, 3, "aes"},      {AT_HWCAP, 7, "crc32"},  {AT_HWCAP, 8, "atomics"},
    {AT_HWCAP, 9, "fphp"},    {AT_HWCAP, 10, "asimdhp"}, {AT_HWCAP, 20, "asimddp"}, {AT_HWCAP, 22, "sve"},
    {AT_HWCAP, 23, "asimdfhm"}, {AT_HWCAP2, 1, "sve2"},  {AT_HWCAP2, 13, "i8mm"}, {AT_HWCAP2, 14, "bf16"},
    {AT_HWCAP2, 23, "sme"},
};
#elif defined(__x86_64__)
struct Bit {
  unsigned leaf;
  unsigned part;  // of the leaf
  unsigned word;  // 0 eax, 1 ebx, 2 ecx, 3 edx
  unsigned place;
  const char* name;
};
constexpr Bit kBits[] = {
    {1, 0, 2, 19, "sse4_1"}, {1, 0, 2, 20, "sse4_2"}, {1, 0, 2, 28, "avx"},          {1, 0, 2, 12, "fma"},
    {1, 0, 2, 29, "f16c"},   {7, 0, 1, 5, "avx2"},    {7, 0, 1, 16, "avx512f"},      {7, 0, 2, 11, "avx512_vnni"},
    {7, 1, 0, 4, "avx_vnni"}, {7, 1, 0, 5, "avx512_bf16"}, {7, 0, 3, 24, "amx_tile"}, {7, 0, 3, 25, "amx_int8"},
};
#endif

}  // namespace

std::vector<std::string> cpu_features() {
  std::vector<std::string> found;
#if defined(__aarch64__)
  for (const Bit& bit : kBits) {
    if ((getauxval(bit.kind) >> bit.place) & 1UL) found.emplace_back(bit.name);
  }
#elif defined(__x86_64__)
  for (const Bit& bit : kBits) {
    unsigned words[4] = {};
    const bool known = __get_cpuid_count(bit.leaf, bit.part, &words[0], &words[1], &words[2], &words[3]) != 0;
    if (known && ((words[bit.word] >> bit.place) & 1U)) found.emplace_back(bit.name);
  }
#endif
  return found;
}

MachineState read_state() {
  MachineState state;
  for (int index = 0; index < kMaxSensors; ++index) {
    const std::string zone = "/sys/class/thermal/thermal_zone" + std::to_string(index);
    const std::string degrees = first_line(zone + "/temp");
    if (degrees.empty()) break;
    const std::string kind = first_line(zone + "/type");
    state.temperatures_c.emplace_back(std::to_string(index) + " " + kind, std::atof(degrees.c_str()) / 1e3);
  }
  for (int index = 0; index < kMaxSensors; ++index) {
    const std::string cpu = "cpu" + std::to_string(index);
    const std::string clock = first_line("/sys/devices/system/cpu/" + cpu + "/cpufreq/scaling_cur_freq");
    if (clock.empty()) break;
    const long long khz = std::atoll(clock.c_str());
    if (khz >= 0) state.clocks_khz.emplace_back(cpu, khz);
  }
  return state;
}

std::string system_name() {
  utsname name;
  if (uname(&name) != 0) return "";
  return std::string(name.sysname) + " " + name.release + " " + name.machine;
}

// VmHWM where there is a /proc: ru_maxrss also counts the parent before the exec.
std::int64_t peak_rss_bytes() {
  if (std::FILE* file = std::fopen("/proc/self/status", "re")) {
    char line[256];
    long long kib = -1;
    while (kib < 0 && std::fgets(line, sizeof line, file) != nullptr) {
      if (std::strncmp(line, "VmHWM:", 6) == 0) kib = std::atoll(line + 6);
    }
    std::fclose(file);
    if (kib >= 0) return kib * 1024;
  }
  rusage usage;
  return getrusage(RUSAGE_SELF, &usage) == 0 ? static_cast<std::int64_t>(usage.ru_maxrss) * 1024 : 0;
}

}  // namespace edgekit
