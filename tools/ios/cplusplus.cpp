// Parts of libc++ that differ: kinds of letters, and positions in streams. Their shapes are those of libc++ for Apple.
#include <cctype>
#include <cstdint>
#include <cstring>
#include <istream>
#include <locale>
#include <streambuf>

#include "image.h"

namespace {

// _types/_ctype.h and libc++'s __locale_dir/ctype.h.
enum Kind : std::uint32_t {
  kAlpha = 0x100, kControl = 0x200, kDigit = 0x400, kGraph = 0x800, kLower = 0x1000, kPunctuation = 0x2000,
  kSpace = 0x4000, kUpper = 0x8000, kHexadecimal = 0x10000, kBlank = 0x20000, kPrint = 0x40000, kWord = 0x80,
};

std::uint32_t kinds_of(int letter) {
  static const struct {
    int (*is)(int);
    Kind kind;
  } tests[] = {{isalpha, kAlpha}, {iscntrl, kControl}, {isdigit, kDigit},       {isgraph, kGraph},
               {islower, kLower}, {ispunct, kPunctuation}, {isspace, kSpace},   {isupper, kUpper},
               {isxdigit, kHexadecimal}, {isblank, kBlank}, {isprint, kPrint}};
  std::uint32_t kinds = 0;
  for (const auto& test : tests) kinds |= letter < 128 && test.is(letter) != 0 ? test.kind : 0;
  return kinds;
}

}  // namespace

extern "C" {

// runetype.h
struct RuneLocale {
  char magic[8];
  char encoding[32];
  void* functions[2];
  std::int32_t invalid;
  std::uint32_t kinds[256];
  std::int32_t lower[256], upper[256];
  char rest[512];
};
RuneLocale darwin__DefaultRuneLocale;

int darwin___maskrune(int letter, unsigned long kinds) {
  return letter >= 0 && letter < 256 ? static_cast<int>(darwin__DefaultRuneLocale.kinds[letter] & kinds) : 0;
}

int darwin___tolower(int letter) { return tolower(letter); }
int darwin___toupper(int letter) { return toupper(letter); }
}

namespace {

[[gnu::constructor]] void fill_letters() {
  for (int letter = 0; letter < 256; ++letter) {
    darwin__DefaultRuneLocale.kinds[letter] = kinds_of(letter);
    darwin__DefaultRuneLocale.lower[letter] = letter < 128 ? tolower(letter) : letter;
    darwin__DefaultRuneLocale.upper[letter] = letter < 128 ? toupper(letter) : letter;
  }
}

// std::ctype<char>: code of the object looks kinds up in a table of 32-bit words that the facet points to.
struct CharFacet {
  void* functions;
  long owners;
  const std::uint32_t* kinds;
  bool frees;
};

const void* facet_of_char() {
  static CharFacet facet = [] {
    const auto& own = std::use_facet<std::ctype<char>>(std::locale::classic());
    CharFacet made{};
    std::memcpy(&made, static_cast<const void*>(&own), 16);
    made.kinds = darwin__DefaultRuneLocale.kinds;
    return made;
  }();
  return &facet;
}

}  // namespace

extern "C" {

const void* real_use_facet(const void* locale, void* id) __asm__("_ZNKSt3__16locale9use_facetERNS0_2idE");

const void* darwin__ZNKSt3__16locale9use_facetERNS0_2idE(const void* locale, void* id) {
  return id == static_cast<void*>(&std::ctype<char>::id) ? facet_of_char() : real_use_facet(locale, id);
}

// Classes in a std::regex, such as [:alpha:] and \w, as the bits above.
std::uint32_t darwin__ZNSt3__115__get_classnameEPKcb(const char* name, bool any_case) {
  static const struct {
    const char* name;
    std::uint32_t kinds;
  } classes[] = {{"alnum", kAlpha | kDigit}, {"alpha", kAlpha}, {"blank", kBlank}, {"cntrl", kControl}, {"d", kDigit},
                 {"digit", kDigit}, {"graph", kAlpha | kDigit | kPunctuation}, {"lower", kLower}, {"print", kPrint},
                 {"punct", kPunctuation}, {"s", kSpace}, {"space", kSpace}, {"upper", kUpper},
                 {"w", kWord | kAlpha | kDigit | kUpper | kLower}, {"xdigit", kHexadecimal}};
  for (const auto& known : classes) {
    if (std::strcmp(known.name, name) != 0) continue;
    return known.kinds | (any_case && (known.kinds & (kLower | kUpper)) != 0 ? kAlpha : 0U);
  }
  return 0;
}

// A position holds the state of a conversion, which has 128 bytes there and 8 here. So it comes back in memory there and
// in registers here. Buffers are the object's own, all but the standard streams'.
struct Position {
  char state[128];
  std::int64_t offset;
};

Position* darwin__ZNSt3__115basic_streambufIcNS_11char_traitsIcEEE7seekoffExNS_8ios_base7seekdirEj(Position* out) {
  *out = Position{{}, -1};
  return out;
}

Position* darwin__ZNSt3__115basic_streambufIcNS_11char_traitsIcEEE7seekposENS_4fposI11__mbstate_tEEj(Position* out) {
  *out = Position{{}, -1};
  return out;
}
}

namespace {

std::int64_t seek_input(std::istream* stream, std::int64_t offset, std::ios_base::seekdir from) {
  std::streambuf* buffer = stream->rdbuf();
  void* const* functions = *reinterpret_cast<void* const* const*>(buffer);
  if (!is_in_image(functions)) return buffer->pubseekoff(offset, from, std::ios_base::in);
  using Seek = Position* (*)(Position*, std::streambuf*, std::int64_t, std::ios_base::seekdir, std::ios_base::openmode);
  constexpr int kSeekOff = 4;  // among the virtual functions of a buffer
  Position position;
  reinterpret_cast<Seek>(functions[kSeekOff])(&position, buffer, offset, from, std::ios_base::in);
  return position.offset;
}

}  // namespace

extern "C" {

Position* darwin__ZNSt3__113basic_istreamIcNS_11char_traitsIcEEE5tellgEv(Position* out, std::istream* stream) {
  const std::istream::sentry ready(*stream, true);
  *out = Position{{}, stream->fail() ? -1 : seek_input(stream, 0, std::ios_base::cur)};
  return out;
}

std::istream* darwin__ZNSt3__113basic_istreamIcNS_11char_traitsIcEEE5seekgExNS_8ios_base7seekdirE(
    std::istream* stream, std::int64_t offset, std::ios_base::seekdir from) {
  stream->clear(stream->rdstate() & ~std::ios_base::eofbit);
  const std::istream::sentry ready(*stream, true);
  if (!stream->fail() && seek_input(stream, offset, from) == -1) stream->setstate(std::ios_base::failbit);
  return stream;
}
}
