// Pipes, and the messages that pass through them: a line of JSON, and then the bytes of each tensor.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "session.h"
#include "tensor.h"

namespace edgekit {

constexpr std::size_t kMaxLine = std::size_t{1} << 20;

class Reader {
 public:
  explicit Reader(int descriptor) : descriptor_(descriptor), chunk_(std::size_t{1} << 16) {}

  // Returns false at the end. Throws Failure: the line is longer than a MiB or has no end.
  bool read_line(std::string& line);

  // Throws Failure: the stream ends before.
  void read_exactly(char* out, std::size_t size, const std::string& what);

 private:
  std::size_t fill();

  int descriptor_;
  std::vector<char> chunk_;
  std::size_t at_ = 0;
  std::size_t end_ = 0;
};

// Throws Failure: the other side takes no more.
void write_all(int descriptor, const char* data, std::size_t size);

// Returns false at the end of the stream; `tensors` keep their memory from call to call.
bool read_message(Reader& reader, std::vector<Tensor>& tensors);

void write_message(int descriptor, const std::vector<View>& views);

}  // namespace edgekit
