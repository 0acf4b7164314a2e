// JSON read strictly and within bounds: what comes from outside may be anything.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace edgekit {

struct Json {
  enum class Kind { null, boolean, whole, number, text, list, object };

  Kind kind = Kind::null;
  bool truth = false;
  std::int64_t whole = 0;  // for Kind::whole
  double number = 0;       // for Kind::whole and Kind::number
  std::string text;
  std::vector<Json> items;  // of a list, or the values of `keys`
  std::vector<std::string> keys;

  // Returns the value of a key, or null where there is none.
  const Json* find(std::string_view key) const;

  // Each returns the value of a key, or `otherwise` where there is none; another type is a Failure that names the key.
  std::string text_of(std::string_view key, const std::string& otherwise = "") const;
  std::int64_t whole_of(std::string_view key, std::int64_t otherwise) const;
  double number_of(std::string_view key, double otherwise) const;
  bool truth_of(std::string_view key, bool otherwise) const;
  std::vector<std::pair<std::string, std::string>> words_of(std::string_view key) const;
};

// Returns the value that a text holds. Throws Failure: it is malformed, deeper than 32, or has a key twice.
Json parse_json(std::string_view text);

// Returns the strings of a JSON array that must hold exactly `count` of them. Throws Failure otherwise.
std::vector<std::string> parse_strings(std::string_view text, std::size_t count);

// Append a value; bytes that are no UTF-8 become '?'.
void append_text(std::string& out, std::string_view text);
void append_number(std::string& out, double value);

bool is_utf8(std::string_view text);

}  // namespace edgekit
