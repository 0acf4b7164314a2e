#include "npz.h"

#include <algorithm>
#include <cstring>

#include "failure.h"

namespace edgekit {
namespace {

// Sizes and signatures of PKWARE's APPNOTE, sections 4.3.7, 4.3.12 and 4.3.16.
constexpr std::size_t kEndSize = 22;
constexpr std::size_t kEntrySize = 46;
constexpr std::size_t kLocalSize = 30;
constexpr std::uint32_t kEndMark = 0x06054b50;
constexpr std::uint32_t kEntryMark = 0x02014b50;
constexpr std::uint32_t kLocalMark = 0x04034b50;
constexpr std::size_t kMaxDirectory = std::size_t{1} << 20;

std::uint32_t word(const unsigned char* at, unsigned size) {
  std::uint32_t value = 0;
  for (unsigned index = 0; index < size; ++index) value |= std::uint32_t{at[index]} << (8 * index);
  return value;
}

}  // namespace

Npz::Npz(const std::string& path) : path_(path), file_(open_file(path, "rbe")) { list_entries(); }

void Npz::list_entries() {
  const auto fail = [&](const char* reason) -> void { throw Failure(quoted(path_) + " is malformed: " + reason); };
  unsigned char end[kEndSize];
  const bool read = fseeko(file_.get(), -static_cast<off_t>(kEndSize), SEEK_END) == 0 &&
                    std::fread(end, 1, kEndSize, file_.get()) == kEndSize;
  if (!read || word(end, 4) != kEndMark) fail("it is no .npz of edgekit");
  const std::size_t size = word(end + 12, 4);
  if (size > kMaxDirectory) fail("its directory is too large");
  std::vector<unsigned char> directory(size);
  if (fseeko(file_.get(), static_cast<off_t>(word(end + 16, 4)), SEEK_SET) != 0 ||
      std::fread(directory.data(), 1, size, file_.get()) != size) {
    fail("its directory ends early");
  }
  for (std::size_t at = 0; at + kEntrySize <= size;) {
    const unsigned char* entry = directory.data() + at;
    const std::size_t name_size = word(entry + 28, 2);
    const std::size_t next = at + kEntrySize + name_size + word(entry + 30, 2) + word(entry + 32, 2);
    if (word(entry, 4) != kEntryMark || next > size) fail("its directory is damaged");
    if (word(entry + 10, 2) != 0) fail("an array is deflated");
    std::string name(reinterpret_cast<const char*>(entry + kEntrySize), name_size);
    const std::string ending = ".npy";
    if (name.size() <= ending.size() || name.substr(name.size() - ending.size()) != ending) fail("it holds other files");
    name.resize(name.size() - ending.size());
    unsigned char local[kLocalSize];
    const auto start = static_cast<off_t>(word(entry + 42, 4));
    if (fseeko(file_.get(), start, SEEK_SET) != 0 ||
        std::fread(local, 1, kLocalSize, file_.get()) != kLocalSize || word(local, 4) != kLocalMark) {
      fail("an entry is damaged");
    }
    names_.push_back(name);
    offsets_.push_back(start + static_cast<off_t>(kLocalSize + word(local + 26, 2) + word(local + 28, 2)));
    at = next;
  }
}

void Npz::read_row(std::size_t index, std::int64_t row, Tensor& tensor) {
  if (fseeko(file_.get(), static_cast<off_t>(offsets_[index]), SEEK_SET) != 0) throw Failure("cannot read " + path_);
  NpyHeader header = read_npy_header(file_.get(), path_);
  if (header.shape.empty() || row < 0 || row >= header.shape[0]) {
    throw Failure(quoted(path_) + " has no row " + std::to_string(row) + " of " + quoted(names_[index]));
  }
  header.shape.erase(header.shape.begin());
  const std::int64_t size = count_elements(header.shape, path_) * static_cast<std::int64_t>(header.item_size);
  if (fseeko(file_.get(), static_cast<off_t>(row * size), SEEK_CUR) != 0) throw Failure("cannot read " + path_);
  read_npy_items(file_.get(), header, path_, tensor);
  tensor.name = names_[index];
}

}  // namespace edgekit
