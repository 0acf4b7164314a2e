#include "hand.h"

#include <dirent.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "failure.h"
#include "files.h"
#include "report.h"

namespace edgekit {

namespace {

struct Sample {
  std::string name;    // "" for the only one
  std::string folder;
};

bool is_folder(const std::string& path) {
  struct stat facts;
  return stat(path.c_str(), &facts) == 0 && S_ISDIR(facts.st_mode);
}

bool is_file(const std::string& path) {
  struct stat facts;
  return stat(path.c_str(), &facts) == 0 && S_ISREG(facts.st_mode);
}

// Orders numbers in names by their value: test_data_set_2 before test_data_set_10.
bool natural_less(const std::string& first, const std::string& second) {
  const auto key = [](const std::string& name) {
    const std::size_t start = name.find_last_not_of("0123456789") + 1;
    return std::make_pair(name.substr(0, start), std::make_pair(name.size() - start, name.substr(start)));
  };
  return key(first) < key(second);
}

std::vector<Sample> list_samples(const std::string& folder) {
  DIR* entries = opendir(folder.c_str());
  if (entries == nullptr) throw Failure("cannot open " + quoted(folder) + ": " + std::strerror(errno));
  std::vector<std::string> names;
  while (const dirent* entry = readdir(entries)) {
    const std::string name = entry->d_name;
    if (name[0] != '.' && is_folder(folder + "/" + name)) names.push_back(name);
  }
  closedir(entries);
  if (names.empty()) return {{"", folder}};
  std::sort(names.begin(), names.end(), natural_less);
  std::vector<Sample> samples;
  for (const std::string& name : names) samples.push_back({name, folder + "/" + name});
  return samples;
}

void read_sample(const Sample& sample, const std::vector<std::string>& inputs, std::vector<Tensor>& tensors) {
  tensors.resize(inputs.size());
  for (std::size_t index = 0; index < inputs.size(); ++index) {
    const std::string numbered = sample.folder + "/input_" + std::to_string(index);
    const std::string named = sample.folder + "/" + inputs[index] + ".npy";
    const bool plain = inputs[index].find('/') == std::string::npos;
    if (plain && is_file(named)) read_npy(named, tensors[index]);
    else if (is_file(numbered + ".npy")) read_npy(numbered + ".npy", tensors[index]);
    else if (is_file(numbered + ".pb")) read_pb(numbered + ".pb", tensors[index]);
    else throw Failure(quoted(sample.folder) + " holds no input_" + std::to_string(index) + ".npy or .pb for input " +
                       quoted(inputs[index]));
    tensors[index].name = inputs[index];
  }
}

void make_folder(const std::string& path) {
  if (mkdir(path.c_str(), 0777) != 0 && errno != EEXIST) {
    throw Failure("cannot make " + quoted(path) + ": " + std::strerror(errno));
  }
}

void write_outputs(const Options& options, const Sample& sample, const std::vector<View>& views) {
  if (options.outputs.empty()) return;
  make_folder(options.outputs);
  const std::string folder = sample.name.empty() ? options.outputs : options.outputs + "/" + sample.name;
  make_folder(folder);
  for (std::size_t index = 0; index < views.size(); ++index) {
    const std::string path = folder + "/output_" + std::to_string(index) + "." + options.format;
    options.format == "pb" ? write_pb(path, views[index]) : write_npy(path, views[index]);
  }
}

void write_report(const std::string& path, const Report& report, bool node_times) {
  const std::string text = format_report(report, node_times);
  const File file = path.empty() ? nullptr : open_file(path, "wbe");
  std::FILE* out = file != nullptr ? file.get() : stdout;
  if (std::fwrite(text.data(), 1, text.size(), out) != text.size() || std::fflush(out) != 0) {
    throw Failure("cannot write the report: " + std::string(std::strerror(errno)));
  }
}

}  // namespace

int run_by_hand(const Options& options) {
  if (options.job.model.empty() || options.inputs.empty()) throw Failure("--model and --inputs are needed");
  const std::vector<Sample> samples = list_samples(options.inputs);
  const Ort ort(options.job.runtime);
  Report report;
  report.ort_version = ort.version();
  report.from_profile = options.job.profile;
  report.before = read_state();
  Session session(ort, options.job);
  report.load_ms = session.load_ms();
  if (!options.job.profile) report.placement = session.placement();
  std::vector<Tensor> tensors;
  for (std::size_t index = 0; index < samples.size(); ++index) {
    read_sample(samples[index], session.inputs(), tensors);
    session.bind(tensors);
    for (std::int64_t run = 0; index == 0 && run < options.warmup; ++run) session.run();
    for (std::int64_t run = 0; run < options.job.repeat; ++run) report.latency_ms.push_back(session.run());
    if (options.job.profile && index == 0) report.placement = session.placement();
    write_outputs(options, samples[index], session.views());
  }
  report.status = "done";
  report.after = read_state();
  write_report(options.report, report, options.job.profile);
  return 0;
}

}  // namespace edgekit
