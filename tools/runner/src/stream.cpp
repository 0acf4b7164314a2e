#include "stream.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "failure.h"
#include "json.h"

namespace edgekit {
namespace {

constexpr std::size_t kMaxTensors = 4096;

void read_header(const std::string& line, std::vector<Tensor>& tensors, std::vector<std::size_t>& sizes) {
  const Json header = parse_json(line);
  if (header.kind != Json::Kind::list) throw Failure("the header of a sample is no list");
  if (header.items.size() > kMaxTensors) throw Failure("a sample has more than 4096 tensors");
  tensors.resize(header.items.size());
  sizes.assign(header.items.size(), 0);
  std::int64_t total = 0;
  for (std::size_t index = 0; index < header.items.size(); ++index) {
    const Json& entry = header.items[index];
    Tensor& tensor = tensors[index];
    tensor.name = entry.text_of("name");
    for (std::size_t other = 0; other < index; ++other) {
      if (tensors[other].name == tensor.name) throw Failure("a sample has " + quoted(tensor.name) + " twice");
    }
    tensor.dtype = find_dtype(entry.text_of("dtype"));
    if (tensor.dtype == nullptr) throw Failure("the dtype of " + quoted(tensor.name) + " is unknown");
    const Json* shape = entry.find("shape");
    if (shape == nullptr || shape->kind != Json::Kind::list) throw Failure(quoted(tensor.name) + " has no shape");
    tensor.shape.clear();
    for (const Json& size : shape->items) {
      if (size.kind != Json::Kind::whole) throw Failure("the shape of " + quoted(tensor.name) + " is malformed");
      tensor.shape.push_back(size.whole);
    }
    const std::int64_t count = count_elements(tensor.shape, tensor.name);
    const std::int64_t size = entry.whole_of("size_bytes", -1);
    const bool fits = tensor.dtype->size == 0 || size == count * static_cast<std::int64_t>(tensor.dtype->size);
    if (size < 0 || !fits) throw Failure("the size of " + quoted(tensor.name) + " is not that of its shape");
    if (size > kMaxBytes || (total += size) > kMaxBytes) throw Failure("a sample is larger than 4 GiB");
    sizes[index] = static_cast<std::size_t>(size);
  }
}

std::string strings_payload(const std::vector<std::string>& words) {
  std::string out = "[";
  for (const std::string& word : words) {
    if (out.size() > 1) out.push_back(',');
    append_text(out, word);
  }
  return out + "]";
}

}  // namespace

std::size_t Reader::fill() {
  ssize_t count = 0;
  do {
    count = read(descriptor_, chunk_.data(), chunk_.size());
  } while (count < 0 && errno == EINTR);
  if (count < 0) throw Failure(std::string("cannot read the input: ") + std::strerror(errno));
  at_ = 0;
  end_ = static_cast<std::size_t>(count);
  return end_;
}

bool Reader::read_line(std::string& line) {
  line.clear();
  while (true) {
    if (at_ == end_ && fill() == 0) {
      if (line.empty()) return false;
      throw Failure("the input ends in the middle of a line");
    }
    const char* start = chunk_.data() + at_;
    const auto* stop = static_cast<const char*>(std::memchr(start, '\n', end_ - at_));
    const std::size_t count = stop != nullptr ? static_cast<std::size_t>(stop - start) : end_ - at_;
    if (line.size() + count > kMaxLine) throw Failure("a line of the input is longer than a MiB");
    line.append(start, count);
    at_ += count;
    if (stop != nullptr) {
      ++at_;
      return true;
    }
  }
}

void Reader::read_exactly(char* out, std::size_t size, const std::string& what) {
  while (size > 0) {
    if (at_ == end_ && size >= chunk_.size()) {
      const ssize_t count = read(descriptor_, out, size);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) throw Failure("the input ends in the middle of " + quoted(what));
      out += count;
      size -= static_cast<std::size_t>(count);
      continue;
    }
    if (at_ == end_ && fill() == 0) throw Failure("the input ends in the middle of " + quoted(what));
    const std::size_t count = std::min(size, end_ - at_);
    std::memcpy(out, chunk_.data() + at_, count);
    at_ += count;
    out += count;
    size -= count;
  }
}

void write_all(int descriptor, const char* data, std::size_t size) {
  while (size > 0) {
    const ssize_t count = write(descriptor, data, size);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw Failure(std::string("cannot write the output: ") + std::strerror(errno));
    data += count;
    size -= static_cast<std::size_t>(count);
  }
}

bool read_message(Reader& reader, std::vector<Tensor>& tensors) {
  std::string line;
  if (!reader.read_line(line)) return false;
  std::vector<std::size_t> sizes;
  read_header(line, tensors, sizes);
  for (std::size_t index = 0; index < tensors.size(); ++index) {
    Tensor& tensor = tensors[index];
    char* room = tensor.bytes.resize(sizes[index]);
    reader.read_exactly(room, sizes[index], tensor.name);
    tensor.words.clear();
    if (tensor.dtype->onnx == kString) {
      const auto count = static_cast<std::size_t>(count_elements(tensor.shape, tensor.name));
      tensor.words = parse_strings({room, sizes[index]}, count);
    }
  }
  return true;
}

void write_message(int descriptor, const std::vector<View>& views) {
  std::string header = "[";
  std::vector<std::string> payloads(views.size());
  for (std::size_t index = 0; index < views.size(); ++index) {
    const View& view = views[index];
    if (view.dtype->onnx == kString) payloads[index] = strings_payload(view.words);
    header += index > 0 ? ",{\"name\":" : "{\"name\":";
    append_text(header, view.name);
    header += ",\"dtype\":\"" + std::string(view.dtype->name) + "\",\"shape\":[";
    for (std::size_t axis = 0; axis < view.shape.size(); ++axis) {
      header += (axis > 0 ? "," : "") + std::to_string(view.shape[axis]);
    }
    header += "],\"size_bytes\":" + std::to_string(view.dtype->size == 0 ? payloads[index].size() : view.size) + "}";
  }
  header += "]\n";
  write_all(descriptor, header.data(), header.size());
  for (std::size_t index = 0; index < views.size(); ++index) {
    const bool words = views[index].dtype->size == 0;
    write_all(descriptor, words ? payloads[index].data() : views[index].data,
              words ? payloads[index].size() : views[index].size);
  }
}

}  // namespace edgekit
