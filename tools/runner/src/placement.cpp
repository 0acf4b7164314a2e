// Which provider took which node: what a session tells, or what the profile of its first run shows.

#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>

#include "failure.h"
#include "json.h"
#include "session.h"

namespace edgekit {
namespace {

constexpr std::size_t kMaxProfileBytes = std::size_t{1} << 28;
constexpr std::string_view kKernel = "_kernel_time";

std::string temporary_folder() {
  const char* named = std::getenv("TMPDIR");
#ifdef __ANDROID__
  std::string pattern = named != nullptr ? named : "/data/local/tmp";
#else
  std::string pattern = named != nullptr ? named : "/tmp";
#endif
  pattern += "/edgekit-XXXXXX";
  if (mkdtemp(pattern.data()) == nullptr) throw Failure("cannot write " + quoted(pattern) + ": set TMPDIR");
  return pattern;
}

// Opens the only file of a folder and removes both, so that nothing is left if the program is killed.
int open_and_unlink(const std::string& folder) {
  int descriptor = -1;
  if (DIR* entries = opendir(folder.c_str())) {
    while (const dirent* entry = readdir(entries)) {
      if (entry->d_name[0] == '.') continue;
      const std::string path = folder + "/" + entry->d_name;
      if (descriptor < 0) descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
      unlink(path.c_str());
    }
    closedir(entries);
  }
  rmdir(folder.c_str());
  return descriptor;
}

std::string read_all(int descriptor) {
  std::string text;
  char chunk[1 << 16];
  ssize_t count = 0;
  while ((count = read(descriptor, chunk, sizeof chunk)) > 0) {
    text.append(chunk, static_cast<std::size_t>(count));
    if (text.size() > kMaxProfileBytes) throw Refusal("the profile of the first run is too large");
  }
  close(descriptor);
  return text;
}

bool ends_with(const std::string& text, std::string_view ending) {
  return text.size() >= ending.size() && text.compare(text.size() - ending.size(), ending.size(), ending) == 0;
}

void add_event(const Json& event, std::vector<PlacedNode>& nodes) {
  const Json* arguments = event.find("args");
  if (arguments == nullptr || event.text_of("cat") != "Node") return;
  std::string name = event.text_of("name");
  if (!ends_with(name, kKernel)) return;
  name.resize(name.size() - kKernel.size());
  for (const PlacedNode& node : nodes) {
    if (node.name == name) return;
  }
  nodes.push_back({name, arguments->text_of("op_name"), "", arguments->text_of("provider"),
                   static_cast<double>(event.whole_of("dur", 0))});
}

}  // namespace

void Session::watch_profile() {
  profile_folder_ = temporary_folder();
  ort_.check(ort_.EnableProfiling(options_.get(), (profile_folder_ + "/profile").c_str()));
}

void Session::hide_profile() {
  if (!profile_folder_.empty()) profile_file_ = open_and_unlink(profile_folder_);
}

std::vector<PlacedNode> Session::placement() {
  if (!profile_folder_.empty() && !trace_) return profiled();
  return ort_.api() >= kPlacementSince ? assigned() : std::vector<PlacedNode>();
}

std::vector<PlacedNode> Session::assigned() const {
  const OrtEpAssignedSubgraph* const* parts = nullptr;
  std::size_t part_count = 0;
  ort_.check(ort_.Session_GetEpGraphAssignmentInfo(session_.get(), &parts, &part_count));
  std::vector<PlacedNode> placed;
  for (std::size_t part = 0; part < part_count; ++part) {
    const char* provider = nullptr;
    const OrtEpAssignedNode* const* nodes = nullptr;
    std::size_t count = 0;
    ort_.check(ort_.EpAssignedSubgraph_GetEpName(parts[part], &provider));
    ort_.check(ort_.EpAssignedSubgraph_GetNodes(parts[part], &nodes, &count));
    for (std::size_t index = 0; index < count; ++index) {
      const char* name = nullptr;
      const char* domain = nullptr;
      const char* op = nullptr;
      ort_.check(ort_.EpAssignedNode_GetName(nodes[index], &name));
      ort_.check(ort_.EpAssignedNode_GetDomain(nodes[index], &domain));
      ort_.check(ort_.EpAssignedNode_GetOperatorType(nodes[index], &op));
      placed.push_back({name, op, domain, provider});
    }
  }
  return placed;
}

int Session::end_trace() {
  char* name = nullptr;
  ort_.check(ort_.SessionEndProfiling(session_.get(), allocator_, &name));
  ort_.check(ort_.AllocatorFree(allocator_, name));
  const int descriptor = profile_file_;
  profile_file_ = -1;
  return descriptor;
}

std::vector<PlacedNode> Session::profiled() {
  const int descriptor = end_trace();
  std::vector<PlacedNode> nodes;
  if (descriptor < 0) return nodes;
  const Json events = parse_json(read_all(descriptor));
  for (const Json& event : events.items) add_event(event, nodes);
  return nodes;
}

}  // namespace edgekit
