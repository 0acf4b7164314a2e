#include "pipe.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "failure.h"
#include "report.h"
#include "stream.h"

namespace edgekit {
namespace {

constexpr int kNobodyReads = 3;

// Ends the program as soon as nobody reads its answers any more, even in the middle of a long run.
void watch_reader(int descriptor) {
  std::thread([descriptor] {
    pollfd watched{descriptor, 0, 0};
    while (poll(&watched, 1, -1) <= 0) {
    }
    _exit(kNobodyReads);
  }).detach();
}

// Returns a private copy of stdout; what libraries print goes to stderr from now on.
int claim_stdout() {
  const int descriptor = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3);
  if (descriptor < 0 || dup2(STDERR_FILENO, STDOUT_FILENO) < 0) throw Failure("stdout is closed");
  return descriptor;
}

std::string serve_samples(const Job& job, Session& session, Reader& reader, int out, Report& report) {
  std::vector<Tensor> sample;
  const double begin = now_ms();
  for (std::int64_t index = 0;; ++index) {
    if (index >= job.least_samples && now_ms() - begin > job.budget_s * 1e3) return "stopped";
    if (!read_message(reader, sample)) return "done";
    session.bind(sample);
    if (job.concurrency > 1) {
      report.elapsed_ms.push_back(session.run_together(job.repeat, job.concurrency, report.latency_ms));
    } else {
      for (std::int64_t run = 0; run < job.repeat; ++run) report.latency_ms.push_back(session.run());
    }
    if (job.profile && index == 0) report.placement = session.placement();
    write_message(out, session.views());
  }
}

std::string run_samples(const Job& job, Reader& reader, int out, Report& report) {
  const Ort ort(job.runtime);
  report.ort_version = ort.version();
  Session session(ort, job);
  report.load_ms = session.load_ms();
  if (!job.profile) report.placement = session.placement();
  const std::string status = serve_samples(job, session, reader, out, report);
  if (job.trace) {
    report.trace = session.end_trace();
    struct stat facts;
    if (report.trace >= 0 && fstat(report.trace, &facts) == 0) report.trace_bytes = facts.st_size;
  }
  return status;
}

// Sends so many bytes of an open file: what its line promised, whatever the file has become.
void send_file(int out, int descriptor, std::int64_t left) {
  char chunk[1 << 16];
  while (left > 0) {
    const ssize_t count = read(descriptor, chunk, std::min<std::size_t>(sizeof chunk, static_cast<std::size_t>(left)));
    if (count <= 0) throw Failure("the profile ends early");
    write_all(out, chunk, static_cast<std::size_t>(count));
    left -= count;
  }
}

}  // namespace

int serve_pipe() {
  const int out = claim_stdout();
  watch_reader(out);
  Reader reader(STDIN_FILENO);
  std::string line;
  if (!reader.read_line(line)) throw Failure("stdin holds no job");
  const Job job = read_job(parse_json(line));
  Report report;
  report.from_profile = job.profile;
  report.before = read_state();
  try {
    report.status = run_samples(job, reader, out, report);
  } catch (const std::exception& error) {
    report.status = "refused";
    report.message = first_words(error.what());
  }
  report.after = read_state();
  const std::string text = format_report(report);
  write_all(out, text.data(), text.size());
  if (report.trace >= 0) send_file(out, report.trace, report.trace_bytes);
  return 0;
}

}  // namespace edgekit
