// Are the runner's declarations of ONNX Runtime's C interface those of its real header? It is compiled, and never run.
#include <onnxruntime_c_api.h>

#include <cstddef>
#include <type_traits>

#include "ort.h"

namespace {

// Does a call pass two types alike: the same, or an enumeration and an integer of its size, also behind pointers?
template <typename A, typename B>
constexpr bool alike() {
  if constexpr (std::is_same_v<A, B>) return true;
  else if constexpr (std::is_pointer_v<A> && std::is_pointer_v<B>)
    return alike<std::remove_pointer_t<A>, std::remove_pointer_t<B>>();
  else if constexpr (std::is_enum_v<A> && std::is_integral_v<B>) return sizeof(A) == sizeof(B);
  else return false;
}

template <typename... A>
struct Arguments {
  template <typename... B>
  static constexpr bool match() {
    if constexpr (sizeof...(A) != sizeof...(B)) return false;
    else return (alike<A, B>() && ...);
  }
};

template <typename R, typename... A, typename S, typename... B>
constexpr bool match(R (*)(A...), S (*)(B...)) {
  return alike<R, S>() && Arguments<A...>::template match<B...>();
}

#define EDGEKIT_CHECK(name, place, parameters, result)                                             \
  static_assert(offsetof(OrtApi, name) == place * sizeof(void*), #name " stands elsewhere");       \
  static_assert(match(decltype(OrtApi::name){}, static_cast<result(*) parameters>(nullptr)), #name " differs");
#define EDGEKIT_CHECK_CALL(name, place, parameters) EDGEKIT_CHECK(name, place, parameters, OrtStatus*)
EDGEKIT_ORT_CALLS(EDGEKIT_CHECK_CALL)
EDGEKIT_ORT_PLAIN(EDGEKIT_CHECK)

}  // namespace
