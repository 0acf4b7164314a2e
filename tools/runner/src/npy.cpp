#include <cerrno>
#include <cstring>

#include "failure.h"
#include "files.h"
#include "json.h"

namespace edgekit {
namespace {

constexpr std::size_t kMaxHeader = 1 << 16;
constexpr char kMagic[] = "\x93NUMPY";
constexpr std::size_t kMagicSize = 6;

[[noreturn]] void malformed(const std::string& path, const char* reason) {
  throw Failure(quoted(path) + " is malformed: " + reason);
}

void read_exactly(std::FILE* file, void* out, std::size_t size, const std::string& path) {
  if (size > 0 && std::fread(out, 1, size, file) != size) malformed(path, "it ends early");
}

// Returns what stands after `'key':` in the dict of a header, from its first sign on.
const char* find_entry(const std::string& header, const char* key, const std::string& path) {
  const std::size_t at = header.find(std::string("'") + key + "':");
  if (at == std::string::npos) malformed(path, "its header lacks a key");
  const char* value = header.c_str() + at + std::strlen(key) + 3;
  return value + std::strspn(value, " ");
}

void parse_descr(const std::string& text, const std::string& path, NpyHeader& header) {
  if (text.size() < 3) malformed(path, "its type is unknown");
  const char order = text[0];
  const bool one_byte = text.substr(1) == "i1" || text.substr(1) == "u1" || text.substr(1) == "b1";
  if (order != '<' && !(order == '|' && one_byte)) malformed(path, "its type is not little-endian");
  if (text[1] == 'U') {
    const long letters = std::strtol(text.c_str() + 2, nullptr, 10);
    if (letters < 0 || letters > (1 << 24)) malformed(path, "its strings are too long");
    header.dtype = find_dtype("string");
    header.item_size = 4 * static_cast<std::size_t>(letters);
    return;
  }
  for (std::int32_t number = 1; number <= 13; ++number) {
    const Dtype* dtype = find_dtype(number);
    if (dtype != nullptr && text.substr(1) == dtype->npy) header.dtype = dtype;
  }
  if (header.dtype == nullptr) malformed(path, "its type is unknown");
  header.item_size = header.dtype->size;
}

void parse_shape(const char* text, const std::string& path, NpyHeader& header) {
  if (*text++ != '(') malformed(path, "its shape is no tuple");
  while (*text != ')') {
    char* end = nullptr;
    errno = 0;
    const long long size = std::strtoll(text, &end, 10);
    if (end == text || errno != 0 || size < 0) malformed(path, "its shape is no tuple of sizes");
    header.shape.push_back(size);
    text = end + std::strspn(end, " ,");
  }
}

void append_letter(std::string& word, std::uint32_t code, const std::string& path) {
  if (code >= 0x110000 || (code >= 0xD800 && code < 0xE000)) malformed(path, "a letter is no Unicode");
  const auto push = [&](std::uint32_t value) { word.push_back(static_cast<char>(value)); };
  if (code < 0x80) {
    push(code);
  } else if (code < 0x800) {
    push(0xC0 | (code >> 6));
    push(0x80 | (code & 0x3F));
  } else {
    if (code < 0x10000) {
      push(0xE0 | (code >> 12));
    } else {
      push(0xF0 | (code >> 18));
      push(0x80 | ((code >> 12) & 0x3F));
    }
    push(0x80 | ((code >> 6) & 0x3F));
    push(0x80 | (code & 0x3F));
  }
}

std::vector<std::uint32_t> letters_of(const std::string& word) {
  std::vector<std::uint32_t> letters;
  for (std::size_t at = 0; at < word.size();) {
    const auto first = static_cast<unsigned char>(word[at]);
    const int more = first < 0x80 ? 0 : first < 0xE0 ? 1 : first < 0xF0 ? 2 : 3;
    std::uint32_t code = more == 0 ? first : first & (0x3FU >> more);
    for (int index = 1; index <= more; ++index) {
      code = (code << 6) | (static_cast<unsigned char>(word[at + static_cast<std::size_t>(index)]) & 0x3FU);
    }
    letters.push_back(code);
    at += static_cast<std::size_t>(more) + 1;
  }
  return letters;
}

std::string npy_header(const std::string& descr, const std::vector<std::int64_t>& shape) {
  std::string dims;
  for (const std::int64_t size : shape) dims += std::to_string(size) + (shape.size() == 1 ? "," : ", ");
  if (shape.size() > 1) dims.resize(dims.size() - 2);
  std::string text = "{'descr': '" + descr + "', 'fortran_order': False, 'shape': (" + dims + "), }";
  const std::size_t start = kMagicSize + 4;
  while ((start + text.size() + 1) % 64 != 0) text.push_back(' ');
  text.push_back('\n');
  std::string out(kMagic, kMagicSize);
  out += {'\x01', '\x00', static_cast<char>(text.size() & 0xFF), static_cast<char>(text.size() >> 8)};
  return out + text;
}

std::string words_as_npy(const View& view) {
  std::size_t most = 1;
  std::vector<std::vector<std::uint32_t>> rows;
  for (const std::string& word : view.words) {
    rows.push_back(letters_of(word));
    most = std::max(most, rows.back().size());
  }
  std::string out = npy_header("<U" + std::to_string(most), view.shape);
  for (std::vector<std::uint32_t>& row : rows) {
    row.resize(most, 0);
    out.append(reinterpret_cast<const char*>(row.data()), most * 4);
  }
  return out;
}

}  // namespace

File open_file(const std::string& path, const char* mode) {
  File file(std::fopen(path.c_str(), mode));
  if (file == nullptr) throw Failure("cannot open " + quoted(path) + ": " + std::strerror(errno));
  return file;
}

std::string read_file(const std::string& path, std::size_t most) {
  const File file = open_file(path, "rbe");
  std::string text;
  char chunk[1 << 16];
  std::size_t count = 0;
  while ((count = std::fread(chunk, 1, sizeof chunk, file.get())) > 0) {
    text.append(chunk, count);
    if (text.size() > most) throw Failure(quoted(path) + " is too large");
  }
  if (std::ferror(file.get()) != 0) throw Failure("cannot read " + quoted(path) + ": " + std::strerror(errno));
  return text;
}

NpyHeader read_npy_header(std::FILE* file, const std::string& path) {
  unsigned char start[8];
  read_exactly(file, start, sizeof start, path);
  if (std::memcmp(start, kMagic, kMagicSize) != 0) malformed(path, "it is no .npy");
  unsigned char length[4] = {};
  read_exactly(file, length, start[6] == 1 ? 2 : 4, path);
  const std::size_t size = length[0] | (length[1] << 8U) | (length[2] << 16U) | (std::size_t{length[3]} << 24U);
  if (start[6] < 1 || start[6] > 3 || size > kMaxHeader) malformed(path, "its header is too long");
  std::string text(size, '\0');
  read_exactly(file, text.data(), size, path);
  NpyHeader header{nullptr, {}, 0};
  const char* descr = find_entry(text, "descr", path);
  const char* end = *descr == '\'' ? std::strchr(descr + 1, '\'') : nullptr;
  if (end == nullptr) malformed(path, "its type is unknown");
  parse_descr(std::string(descr + 1, end), path, header);
  parse_shape(find_entry(text, "shape", path), path, header);
  const std::int64_t count = count_elements(header.shape, path);
  const bool fortran = std::strncmp(find_entry(text, "fortran_order", path), "True", 4) == 0;
  if (fortran && count > 1 && header.shape.size() > 1) malformed(path, "it is in Fortran order");
  if (count * static_cast<std::int64_t>(header.item_size == 0 ? 1 : header.item_size) > kMaxBytes) {
    malformed(path, "it is larger than 4 GiB");
  }
  return header;
}

void read_npy_items(std::FILE* file, const NpyHeader& header, const std::string& path, Tensor& tensor) {
  tensor.dtype = header.dtype;
  tensor.shape = header.shape;
  tensor.words.clear();
  const auto count = static_cast<std::size_t>(count_elements(header.shape, path));
  if (header.dtype->onnx != kString) {
    read_exactly(file, tensor.bytes.resize(count * header.item_size), count * header.item_size, path);
    return;
  }
  std::vector<std::uint32_t> letters(header.item_size / 4);
  for (std::size_t index = 0; index < count; ++index) {
    read_exactly(file, letters.data(), header.item_size, path);
    std::size_t length = letters.size();
    while (length > 0 && letters[length - 1] == 0) --length;
    std::string word;
    for (std::size_t at = 0; at < length; ++at) append_letter(word, letters[at], path);
    tensor.words.push_back(std::move(word));
  }
}

void read_npy(const std::string& path, Tensor& tensor) {
  const File file = open_file(path, "rbe");
  read_npy_items(file.get(), read_npy_header(file.get(), path), path, tensor);
}

void write_npy(const std::string& path, const View& view) {
  const bool words = view.dtype->onnx == kString;
  const char order = view.dtype->size == 1 ? '|' : '<';
  const std::string head = words ? words_as_npy(view) : npy_header(order + std::string(view.dtype->npy), view.shape);
  const File file = open_file(path, "wbe");
  const std::size_t size = words ? 0 : view.size;
  const bool whole = std::fwrite(head.data(), 1, head.size(), file.get()) == head.size() &&
                     (size == 0 || std::fwrite(view.data, 1, size, file.get()) == size) && std::fflush(file.get()) == 0;
  if (!whole) throw Failure("cannot write " + quoted(path) + ": " + std::strerror(errno));
}

}  // namespace edgekit
