// The two functions of Highway's library that its headers call, of which Debian has no archive:
// which instruction sets this processor has. Their names and what they must do are those of
// hwy/targets.h.
#include <hwy/targets.h>

namespace hwy {

ChosenTarget& GetChosenTarget() {
  static ChosenTarget chosen;
  return chosen;
}

int64_t SupportedTargets() {
  const auto all = [](auto... has) { return (has && ...); };
  int64_t targets = HWY_STATIC_TARGET;
  if (!__builtin_cpu_supports("ssse3")) return targets;
  targets |= HWY_SSSE3;
  if (!all(__builtin_cpu_supports("sse4.1"), __builtin_cpu_supports("sse4.2"),
           __builtin_cpu_supports("pclmul"), __builtin_cpu_supports("aes"))) {
    return targets;
  }
  targets |= HWY_SSE4;
  if (!all(__builtin_cpu_supports("avx"), __builtin_cpu_supports("avx2"),
           __builtin_cpu_supports("lzcnt"), __builtin_cpu_supports("bmi"),
           __builtin_cpu_supports("bmi2"), __builtin_cpu_supports("fma"),
           __builtin_cpu_supports("f16c"))) {
    return targets;
  }
  targets |= HWY_AVX2;
  if (!all(__builtin_cpu_supports("avx512f"), __builtin_cpu_supports("avx512vl"),
           __builtin_cpu_supports("avx512dq"), __builtin_cpu_supports("avx512bw"),
           __builtin_cpu_supports("avx512cd"))) {
    return targets;
  }
  return targets | HWY_AVX3;
}

}  // namespace hwy
