// ONNX's TensorProto, by its field numbers in onnx.proto3.

#include <cerrno>
#include <cstring>

#include "failure.h"
#include "files.h"

namespace edgekit {
namespace {

enum Field : std::uint32_t {
  kDims = 1, kDataType = 2, kFloats = 4, kInt32s = 5, kStrings = 6, kInt64s = 7, kName = 8, kRaw = 9, kDoubles = 10,
  kUint64s = 11, kExternal = 13, kLocation = 14
};
enum Wire : std::uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

class Proto {
 public:
  Proto(std::string_view data, const std::string& path) : data_(data), path_(path) {}

  bool at_end() const { return at_ == data_.size(); }

  std::uint64_t varint() {
    std::uint64_t value = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
      if (at_end()) fail();
      const auto byte = static_cast<unsigned char>(data_[at_++]);
      value |= std::uint64_t{byte & 0x7FU} << shift;
      if (byte < 0x80) return value;
    }
    fail();
  }

  std::string_view bytes(std::uint64_t size) {
    if (size > data_.size() - at_) fail();
    const std::string_view found = data_.substr(at_, static_cast<std::size_t>(size));
    at_ += found.size();
    return found;
  }

  [[noreturn]] void fail() const { throw Failure(quoted(path_) + " is no TensorProto"); }

 private:
  std::string_view data_;
  const std::string& path_;
  std::size_t at_ = 0;
};

struct Parts {
  std::int32_t type = 0;
  std::string_view raw;
  bool has_raw = false;
  std::string numbers;                 // of floats and doubles, as they stand
  std::vector<std::uint64_t> varints;  // of the integer fields
};

void take_varints(Proto& proto, std::uint32_t wire, const std::string& path, std::vector<std::uint64_t>& out) {
  if (wire == kVarint) {
    out.push_back(proto.varint());
    return;
  }
  if (wire != kBytes) proto.fail();
  Proto packed(proto.bytes(proto.varint()), path);
  while (!packed.at_end()) out.push_back(packed.varint());
}

void take_numbers(Proto& proto, std::uint32_t wire, std::string& out) {
  if (wire != kBytes && wire != kFixed32 && wire != kFixed64) proto.fail();
  out += proto.bytes(wire == kBytes ? proto.varint() : wire == kFixed32 ? 4 : 8);
}

void skip(Proto& proto, std::uint32_t wire) {
  switch (wire) {
    case kVarint: proto.varint(); return;
    case kFixed64: proto.bytes(8); return;
    case kFixed32: proto.bytes(4); return;
    case kBytes: proto.bytes(proto.varint()); return;
    default: proto.fail();
  }
}

void take_field(Proto& proto, const std::string& path, Tensor& tensor, Parts& parts) {
  const std::uint64_t key = proto.varint();
  const auto wire = static_cast<std::uint32_t>(key & 7);
  std::vector<std::uint64_t> values;
  switch (key >> 3) {
    case kDims:
      take_varints(proto, wire, path, values);
      for (const std::uint64_t size : values) tensor.shape.push_back(static_cast<std::int64_t>(size));
      return;
    case kDataType: parts.type = static_cast<std::int32_t>(proto.varint()); return;
    case kFloats: case kDoubles: take_numbers(proto, wire, parts.numbers); return;
    case kInt32s: case kInt64s: case kUint64s: take_varints(proto, wire, path, parts.varints); return;
    case kStrings: tensor.words.emplace_back(proto.bytes(proto.varint())); return;
    case kName: tensor.name = std::string(proto.bytes(proto.varint())); return;
    case kRaw:
      parts.raw = proto.bytes(proto.varint());
      parts.has_raw = true;
      return;
    case kExternal: throw Failure(quoted(path) + " keeps its data elsewhere, which is not read");
    default: skip(proto, wire);
  }
}

void fill(const std::string& path, const Parts& parts, std::size_t count, Tensor& tensor) {
  const std::size_t size = tensor.dtype->size;
  const std::string_view bytes = parts.has_raw ? parts.raw : std::string_view(parts.numbers);
  if (parts.has_raw || parts.varints.empty()) {
    if (bytes.size() != count * size) throw Failure(quoted(path) + " does not hold what its shape says");
    if (!bytes.empty()) std::memcpy(tensor.bytes.resize(bytes.size()), bytes.data(), bytes.size());
    if (bytes.empty()) tensor.bytes.resize(0);
    return;
  }
  if (parts.varints.size() != count) throw Failure(quoted(path) + " does not hold what its shape says");
  char* room = tensor.bytes.resize(count * size);
  for (std::size_t index = 0; index < count; ++index) std::memcpy(room + index * size, &parts.varints[index], size);
}

void append_varint(std::string& out, std::uint64_t value) {
  while (value >= 0x80) {
    out.push_back(static_cast<char>(value | 0x80));
    value >>= 7;
  }
  out.push_back(static_cast<char>(value));
}

void append_bytes(std::string& out, std::uint32_t field, std::string_view bytes) {
  append_varint(out, (field << 3) | kBytes);
  append_varint(out, bytes.size());
  out += bytes;
}

}  // namespace

void read_pb(const std::string& path, Tensor& tensor) {
  const std::string data = read_file(path, static_cast<std::size_t>(kMaxBytes));
  tensor.shape.clear();
  tensor.words.clear();
  Parts parts;
  Proto proto(data, path);
  while (!proto.at_end()) take_field(proto, path, tensor, parts);
  tensor.dtype = find_dtype(parts.type);
  if (tensor.dtype == nullptr) throw Failure("the type of " + quoted(path) + " is not carried");
  const auto count = static_cast<std::size_t>(count_elements(tensor.shape, path));
  if (tensor.dtype->onnx != kString) return fill(path, parts, count, tensor);
  if (tensor.words.size() != count) throw Failure(quoted(path) + " does not hold what its shape says");
}

void write_pb(const std::string& path, const View& view) {
  std::string head;
  for (const std::int64_t size : view.shape) {
    append_varint(head, (kDims << 3) | kVarint);
    append_varint(head, static_cast<std::uint64_t>(size));
  }
  append_varint(head, (kDataType << 3) | kVarint);
  append_varint(head, static_cast<std::uint64_t>(view.dtype->onnx));
  append_bytes(head, kName, view.name);
  const bool words = view.dtype->onnx == kString;
  for (const std::string& word : view.words) append_bytes(head, kStrings, word);
  if (!words) {
    append_varint(head, (kRaw << 3) | kBytes);
    append_varint(head, view.size);
  }
  const File file = open_file(path, "wbe");
  const bool whole = std::fwrite(head.data(), 1, head.size(), file.get()) == head.size() &&
                     (words || view.size == 0 || std::fwrite(view.data, 1, view.size, file.get()) == view.size) &&
                     std::fflush(file.get()) == 0;
  if (!whole) throw Failure("cannot write " + quoted(path) + ": " + std::strerror(errno));
}

}  // namespace edgekit
