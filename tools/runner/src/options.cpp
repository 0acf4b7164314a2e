#include "options.h"

#include <cerrno>
#include <cstdlib>

#include "failure.h"

namespace edgekit {

const char* const kUsage =
    "usage: edgekit-runner --model FILE --inputs DIR [--outputs DIR] [options]\n"
    "       edgekit-runner --self-test BUNDLE [options]\n"
    "       edgekit-runner --pipe\n"
    "\n"
    "  --self-test BUNDLE  runs the chosen golden samples of a bundle, and exits with 1 where an output is too far off\n"
    "  --form FORM         the form of the bundle's model, for example onnx\n"
    "  --inputs DIR        one sample: INPUT.npy or input_N.npy or input_N.pb; or a folder of such for each sample\n"
    "  --outputs DIR       where output_N.npy go, in a folder for each sample as in --inputs\n"
    "  --format npy|pb     the form of the outputs\n"
    "  --report FILE       where the report goes, as JSON; stdout where it is not given\n"
    "  --library FILE      ONNX Runtime; libonnxruntime.so beside the runner where it is not given\n"
    "  --provider NAME     for example NnapiExecutionProvider; the CPU, or the bundle's own, where it is not given\n"
    "  --ep-library FILE   the library of a plug-in provider\n"
    "  --option KEY=VALUE  of the provider; may be given again\n"
    "  --config KEY=VALUE  of the session; may be given again\n"
    "  --level LEVEL       disabled, basic, extended, layout or all\n"
    "  --threads N         0 lets ONNX Runtime choose\n"
    "  --warmup N          runs that are not counted; --runs N runs of each sample that are\n"
    "  --profile           placement and time of each node, from the first run\n";

namespace {

void add_word(Words& words, const std::string& pair) {
  const std::size_t equals = pair.find('=');
  if (equals == 0 || equals == std::string::npos) throw Failure(quoted(pair) + " is not KEY=VALUE");
  words.emplace_back(pair.substr(0, equals), pair.substr(equals + 1));
}

std::int64_t number(const std::string& option, const std::string& text, std::int64_t least, std::int64_t most) {
  char* end = nullptr;
  errno = 0;
  const long long value = std::strtoll(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || errno != 0 || value < least || value > most) {
    throw Failure(option + " " + quoted(text) + " is no number from " + std::to_string(least) + " to " +
                  std::to_string(most));
  }
  return value;
}

void take_option(Options& options, const std::string& option, const std::string& value) {
  constexpr std::int64_t kMost = 1000000000;
  Job& job = options.job;
  if (option == "--model") job.model = value;
  else if (option == "--inputs") options.inputs = value;
  else if (option == "--outputs") options.outputs = value;
  else if (option == "--format") options.format = value;
  else if (option == "--report") options.report = value;
  else if (option == "--library") job.runtime = value;
  else if (option == "--self-test") options.bundle = value;
  else if (option == "--form") options.form = value;
  else if (option == "--provider") job.provider = value, options.own_provider = true;
  else if (option == "--ep-library") job.library = value;
  else if (option == "--option") add_word(job.provider_options, value);
  else if (option == "--config") add_word(job.session_config, value);
  else if (option == "--level") job.level = value;
  else if (option == "--threads") job.threads = static_cast<int>(number(option, value, 0, 1024));
  else if (option == "--warmup") options.warmup = number(option, value, 0, kMost);
  else if (option == "--runs") job.repeat = number(option, value, 1, kMost);
  else throw Failure("there is no option " + quoted(option));
}

}  // namespace

Options read_options(int count, char** words) {
  Options options;
  for (int index = 1; index < count; ++index) {
    const std::string option = words[index];
    if (option == "--profile") {
      options.job.profile = true;
      continue;
    }
    if (index + 1 == count) throw Failure(quoted(option) + " needs a value");
    take_option(options, option, words[++index]);
  }
  if (options.format != "npy" && options.format != "pb") throw Failure("--format is npy or pb");
  return options;
}

}  // namespace edgekit
