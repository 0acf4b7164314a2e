#include "json.h"

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "failure.h"

namespace edgekit {
namespace {

constexpr int kMaxDepth = 32;

// Returns the length of the UTF-8 sequence at the start of `text`, 0 where there is none.
std::size_t sequence_length(std::string_view text) {
  const auto byte = [&](std::size_t index) { return static_cast<unsigned char>(text[index]); };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  const std::size_t length = first >= 0xC2 && first < 0xE0 ? 2 : first >= 0xE0 && first < 0xF0 ? 3
                             : first >= 0xF0 && first < 0xF5 ? 4 : 0;
  if (length == 0 || text.size() < length) return 0;
  for (std::size_t index = 1; index < length; ++index) {
    if ((byte(index) & 0xC0) != 0x80) return 0;
  }
  const bool overlong = (first == 0xE0 && byte(1) < 0xA0) || (first == 0xF0 && byte(1) < 0x90);
  const bool outside = (first == 0xED && byte(1) >= 0xA0) || (first == 0xF4 && byte(1) >= 0x90);
  return overlong || outside ? 0 : length;
}

void append_utf8(std::string& out, std::uint32_t code) {
  const auto push = [&](std::uint32_t value) { out.push_back(static_cast<char>(value)); };
  if (code < 0x80) {
    push(code);
  } else if (code < 0x800) {
    push(0xC0 | (code >> 6));
    push(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    push(0xE0 | (code >> 12));
    push(0x80 | ((code >> 6) & 0x3F));
    push(0x80 | (code & 0x3F));
  } else {
    push(0xF0 | (code >> 18));
    push(0x80 | ((code >> 12) & 0x3F));
    push(0x80 | ((code >> 6) & 0x3F));
    push(0x80 | (code & 0x3F));
  }
}

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Json read_all() {
    Json value = read_value(0);
    end();
    return value;
  }

  std::vector<std::string> read_strings(std::size_t count) {
    std::vector<std::string> words;
    expect('[');
    for (std::size_t index = 0; index < count; ++index) {
      if (index > 0) expect(',');
      skip_space();
      words.push_back(read_text());
    }
    expect(']');
    end();
    return words;
  }

 private:
  [[noreturn]] void fail(const char* reason) const {
    throw Failure("malformed JSON at byte " + std::to_string(at_) + ": " + reason);
  }

  void skip_space() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\t' || text_[at_] == '\n' || text_[at_] == '\r')) {
      ++at_;
    }
  }

  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

  bool take(char letter) {
    skip_space();
    if (peek() != letter || at_ >= text_.size()) return false;
    ++at_;
    return true;
  }

  void expect(char letter) {
    if (!take(letter)) fail("another sign was expected");
  }

  void end() {
    skip_space();
    if (at_ != text_.size()) fail("there is more after its end");
  }

  bool take_word(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }

  Json read_value(int depth) {
    if (depth > kMaxDepth) fail("it is too deep");
    skip_space();
    Json value;
    switch (peek()) {
      case '{': return read_object(depth);
      case '[': return read_list(depth);
      case '"':
        value.kind = Json::Kind::text;
        value.text = read_text();
        return value;
      case 't':
      case 'f':
        value.kind = Json::Kind::boolean;
        value.truth = take_word("true");
        if (!value.truth && !take_word("false")) fail("it is no word of JSON");
        return value;
      case 'n':
        if (!take_word("null")) fail("it is no word of JSON");
        return value;
      default: return read_number();
    }
  }

  Json read_object(int depth) {
    Json value;
    value.kind = Json::Kind::object;
    expect('{');
    if (take('}')) return value;
    do {
      skip_space();
      std::string key = read_text();
      if (value.find(key) != nullptr) fail("a key stands twice");
      expect(':');
      value.items.push_back(read_value(depth + 1));
      value.keys.push_back(std::move(key));
    } while (take(','));
    expect('}');
    return value;
  }

  Json read_list(int depth) {
    Json value;
    value.kind = Json::Kind::list;
    expect('[');
    if (take(']')) return value;
    do {
      value.items.push_back(read_value(depth + 1));
    } while (take(','));
    expect(']');
    return value;
  }

  std::size_t take_digits() {
    const std::size_t start = at_;
    while (peek() >= '0' && peek() <= '9') ++at_;
    return at_ - start;
  }

  Json read_number() {
    const std::size_t start = at_;
    if (peek() == '-') ++at_;
    const bool zero = peek() == '0';
    const std::size_t digits = take_digits();
    if (digits == 0 || (zero && digits > 1)) fail("it is no value");
    bool whole = true;
    if (peek() == '.') {
      ++at_;
      whole = false;
      if (take_digits() == 0) fail("it is no number");
    }
    if (peek() == 'e' || peek() == 'E') {
      ++at_;
      whole = false;
      if (peek() == '+' || peek() == '-') ++at_;
      if (take_digits() == 0) fail("it is no number");
    }
    const std::string word(text_.substr(start, at_ - start));
    Json value;
    errno = 0;
    value.whole = whole ? std::strtoll(word.c_str(), nullptr, 10) : 0;
    value.kind = whole && errno == 0 ? Json::Kind::whole : Json::Kind::number;
    value.number = std::strtod(word.c_str(), nullptr);
    if (!std::isfinite(value.number)) fail("the number is too large");
    return value;
  }

  std::uint32_t read_hex() {
    std::uint32_t code = 0;
    for (int index = 0; index < 4; ++index, ++at_) {
      const char letter = peek();
      const int digit = letter >= '0' && letter <= '9'   ? letter - '0'
                        : letter >= 'a' && letter <= 'f' ? letter - 'a' + 10
                        : letter >= 'A' && letter <= 'F' ? letter - 'A' + 10
                                                         : -1;
      if (digit < 0) fail("it is no \\u sequence");
      code = code * 16 + static_cast<std::uint32_t>(digit);
    }
    return code;
  }

  void read_escape(std::string& out) {
    const char letter = peek();
    ++at_;
    switch (letter) {
      case '"': case '\\': case '/': out.push_back(letter); return;
      case 'b': out.push_back('\b'); return;
      case 'f': out.push_back('\f'); return;
      case 'n': out.push_back('\n'); return;
      case 'r': out.push_back('\r'); return;
      case 't': out.push_back('\t'); return;
      case 'u': break;
      default: fail("it is no escape");
    }
    std::uint32_t code = read_hex();
    if (code >= 0xDC00 && code < 0xE000) fail("it is half a surrogate pair");
    if (code >= 0xD800 && code < 0xDC00) {
      if (!take_word("\\u")) fail("it is half a surrogate pair");
      const std::uint32_t low = read_hex();
      if (low < 0xDC00 || low >= 0xE000) fail("it is half a surrogate pair");
      code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    }
    append_utf8(out, code);
  }

  std::string read_text() {
    if (peek() != '"') fail("a string was expected");
    ++at_;
    std::string out;
    while (at_ < text_.size()) {
      const auto letter = static_cast<unsigned char>(text_[at_]);
      if (letter == '"') {
        ++at_;
        return out;
      }
      if (letter < 0x20) fail("a control character stands in a string");
      if (letter == '\\') {
        ++at_;
        read_escape(out);
        continue;
      }
      const std::size_t length = sequence_length(text_.substr(at_, 4));
      if (length == 0) fail("it is no UTF-8");
      out.append(text_.substr(at_, length));
      at_ += length;
    }
    fail("a string has no end");
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

[[noreturn]] void wrong_type(std::string_view key, const char* wanted) {
  throw Failure("'" + std::string(key) + "' is no " + wanted);
}

}  // namespace

const Json* Json::find(std::string_view key) const {
  for (std::size_t index = 0; index < keys.size(); ++index) {
    if (keys[index] == key) return &items[index];
  }
  return nullptr;
}

std::string Json::text_of(std::string_view key, const std::string& otherwise) const {
  const Json* value = find(key);
  if (value == nullptr) return otherwise;
  if (value->kind != Kind::text) wrong_type(key, "string");
  if (value->text.find('\0') != std::string::npos) throw Failure("'" + std::string(key) + "' has a null character");
  return value->text;
}

std::int64_t Json::whole_of(std::string_view key, std::int64_t otherwise) const {
  const Json* value = find(key);
  if (value == nullptr) return otherwise;
  if (value->kind != Kind::whole || value->whole < 0) wrong_type(key, "whole number");
  return value->whole;
}

double Json::number_of(std::string_view key, double otherwise) const {
  const Json* value = find(key);
  if (value == nullptr) return otherwise;
  if (value->kind != Kind::whole && value->kind != Kind::number) wrong_type(key, "number");
  return value->number;
}

bool Json::truth_of(std::string_view key, bool otherwise) const {
  const Json* value = find(key);
  if (value == nullptr) return otherwise;
  if (value->kind != Kind::boolean) wrong_type(key, "true or false");
  return value->truth;
}

std::vector<std::pair<std::string, std::string>> Json::words_of(std::string_view key) const {
  std::vector<std::pair<std::string, std::string>> words;
  const Json* value = find(key);
  if (value == nullptr) return words;
  if (value->kind != Kind::object) wrong_type(key, "object of strings");
  for (const std::string& name : value->keys) words.emplace_back(name, value->text_of(name));
  return words;
}

Json parse_json(std::string_view text) { return Parser(text).read_all(); }

std::vector<std::string> parse_strings(std::string_view text, std::size_t count) {
  return Parser(text).read_strings(count);
}

void append_text(std::string& out, std::string_view text) {
  out.push_back('"');
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t length = sequence_length(text.substr(at, 4));
    const auto letter = static_cast<unsigned char>(text[at]);
    if (length == 0) {
      out.push_back('?');
    } else if (letter < 0x20 || letter == 0x7F) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(letter));
      out += escape;
    } else {
      if (letter == '"' || letter == '\\') out.push_back('\\');
      out.append(text.substr(at, length));
    }
    at += length == 0 ? 1 : length;
  }
  out.push_back('"');
}

void append_number(std::string& out, double value) {
  char digits[40];
  std::snprintf(digits, sizeof digits, "%.17g", std::isfinite(value) ? value : 0.0);
  out += digits;
}

bool is_utf8(std::string_view text) {
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t length = sequence_length(text.substr(at, 4));
    if (length == 0) return false;
    at += length;
  }
  return true;
}

}  // namespace edgekit
