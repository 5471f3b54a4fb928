// amx: permission, tile configurations, and the kernels in 2 x 2 and 1 x 4 tiles.
#include "engine/kernels/amx.h"

#include <algorithm>
#include <atomic>
#include <chrono>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#endif

namespace baton::engine {

#if defined(__x86_64__) && defined(__linux__)

// The compilers' own intrinsics differ in what they promise about memory, so these are written out.
// Nothing else uses tile registers, which is why no clobber names them (GCC 12 has no such name).
#define BATON_TILES __attribute__((target("amx-tile,amx-bf16")))
#define BATON_TILES_INLINE BATON_TILES __attribute__((always_inline)) inline
#define BATON_TILE_LOAD(t, from, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(from), "r"(stride) : "memory")
#define BATON_TILE_STORE(t, to, stride) \
  asm volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(to), "r"(stride) : "memory")
#define BATON_TILE_ZERO(t) asm volatile("tilezero %%tmm" #t ::)
#define BATON_TILE_DOT(c, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)

namespace {

constexpr int kTile = 16;
constexpr size_t kTileElements = 512;  // of A or B
constexpr int kPanel = 32;
// Two strips of A of so many steps stay in L1 while panels pass by.
constexpr int kStepsAtOnce = 9;
constexpr int64_t kLine = 64;

std::string_view ask_for_tiles() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kBf16 = 1u << 22, kTileUnit = 1u << 24;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kBf16) == 0 || (d & kTileUnit) == 0) {
    return "the processor has no AMX with bf16";
  }
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0) return "";
  switch (errno) {
    case ENOSPC:
      return "a thread's alternate signal stack is too small for the tiles' state";
    case EINVAL:
      return "the kernel is older than Linux 5.16, or was started without AMX";
    default:
      return "the kernel refuses the tiles' state (arch_prctl ARCH_REQ_XCOMP_PERM)";
  }
}

// 2 x 2: tiles 0 to 3 are C by rows, 4 and 5 A, 6 and 7 B.
// 1 x 4: tiles 0 to 3 are C, 4 is A, 5 to 7 are B.
struct Shape {
  int rows[2] = {0, 0};
  int columns[2] = {0, 0};
  bool one_by_four = false;
  bool operator==(const Shape&) const = default;
};

class TileUnit {
 public:
  BATON_TILES ~TileUnit() { asm volatile("tilerelease" ::); }
  BATON_TILES void become(const Shape& shape) {
    if (shape == shape_) return;
    shape_ = shape;
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    const auto set = [&](int tile, int rows, int columns) {
      config.rows[tile] = static_cast<uint8_t>(rows);
      config.row_bytes[tile] = static_cast<uint16_t>(4 * columns);
      // A tile of no rows and of no columns is one that is not used; one of them alone is an error.
      if (rows == 0 || columns == 0) config.rows[tile] = 0, config.row_bytes[tile] = 0;
    };
    if (shape.one_by_four) {
      for (int t = 0; t < 5; ++t) set(t, shape.rows[0], kTile);
      for (int t = 5; t < 8; ++t) set(t, kTile, kTile);
    } else {
      for (int t = 0; t < 4; ++t) set(t, shape.rows[t / 2], shape.columns[t % 2]);
      for (int t = 4; t < 6; ++t) set(t, shape.rows[t - 4], kTile);
      for (int t = 6; t < 8; ++t) set(t, kTile, shape.columns[t - 6]);
    }
    asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
  }

 private:
  Shape shape_;
};

// kDown x kAcross tiles of C; `a_strip` elements lie between 16 rows of A and the next 16.
template <int kDown, int kAcross>
BATON_TILES void few(const uint16_t* a, size_t a_strip, const uint16_t* b, int steps, float* c,
                     size_t ldc, bool load_c) {
  const int64_t stride = static_cast<int64_t>(ldc * sizeof(float));
  float* below = c + kTile * ldc;
  if (load_c) {
    BATON_TILE_LOAD(0, c, stride);
    if constexpr (kAcross > 1) BATON_TILE_LOAD(1, c + kTile, stride);
    if constexpr (kDown > 1) BATON_TILE_LOAD(2, below, stride);
    if constexpr (kDown > 1 && kAcross > 1) BATON_TILE_LOAD(3, below + kTile, stride);
  } else {
    BATON_TILE_ZERO(0);
    if constexpr (kAcross > 1) BATON_TILE_ZERO(1);
    if constexpr (kDown > 1) BATON_TILE_ZERO(2);
    if constexpr (kDown > 1 && kAcross > 1) BATON_TILE_ZERO(3);
  }
  for (int step = 0; step < steps; ++step) {
    BATON_TILE_LOAD(6, b, kLine);
    BATON_TILE_LOAD(4, a, kLine);
    BATON_TILE_DOT(0, 4, 6);
    if constexpr (kAcross > 1) {
      BATON_TILE_LOAD(7, b + kTileElements, kLine);
      BATON_TILE_DOT(1, 4, 7);
    }
    if constexpr (kDown > 1) {
      BATON_TILE_LOAD(5, a + a_strip, kLine);
      BATON_TILE_DOT(2, 5, 6);
      if constexpr (kAcross > 1) BATON_TILE_DOT(3, 5, 7);
    }
    a += kTileElements;
    b += 2 * kTileElements;
  }
  BATON_TILE_STORE(0, c, stride);
  if constexpr (kAcross > 1) BATON_TILE_STORE(1, c + kTile, stride);
  if constexpr (kDown > 1) BATON_TILE_STORE(2, below, stride);
  if constexpr (kDown > 1 && kAcross > 1) BATON_TILE_STORE(3, below + kTile, stride);
}

// At most 16 rows and two whole panels: four sums under way instead of two.
BATON_TILES void wide(const uint16_t* a, const uint16_t* b, size_t b_panel, int steps, float* c,
                      size_t ldc, bool load_c) {
  const int64_t stride = static_cast<int64_t>(ldc * sizeof(float));
  if (load_c) {
    BATON_TILE_LOAD(0, c, stride);
    BATON_TILE_LOAD(1, c + kTile, stride);
    BATON_TILE_LOAD(2, c + 2 * kTile, stride);
    BATON_TILE_LOAD(3, c + 3 * kTile, stride);
  } else {
    BATON_TILE_ZERO(0);
    BATON_TILE_ZERO(1);
    BATON_TILE_ZERO(2);
    BATON_TILE_ZERO(3);
  }
  for (int step = 0; step < steps; ++step) {
    BATON_TILE_LOAD(4, a, kLine);
    BATON_TILE_LOAD(5, b, kLine);
    BATON_TILE_DOT(0, 4, 5);
    BATON_TILE_LOAD(6, b + kTileElements, kLine);
    BATON_TILE_DOT(1, 4, 6);
    BATON_TILE_LOAD(7, b + b_panel, kLine);
    BATON_TILE_DOT(2, 4, 7);
    BATON_TILE_LOAD(5, b + b_panel + kTileElements, kLine);
    BATON_TILE_DOT(3, 4, 5);
    a += kTileElements;
    b += 2 * kTileElements;
  }
  BATON_TILE_STORE(0, c, stride);
  BATON_TILE_STORE(1, c + kTile, stride);
  BATON_TILE_STORE(2, c + 2 * kTile, stride);
  BATON_TILE_STORE(3, c + 3 * kTile, stride);
}

BATON_TILES double run_registers(int64_t iterations) {
  TileUnit unit;
  unit.become({{kTile, kTile}, {kTile, kTile}, false});
  BATON_TILE_ZERO(0);
  BATON_TILE_ZERO(1);
  BATON_TILE_ZERO(2);
  BATON_TILE_ZERO(3);
  // Zeros would draw less power, and run faster than numbers do.
  alignas(64) uint16_t numbers[4][kTileElements];
  uint32_t seed = 1;
  for (auto& tile : numbers) {
    for (uint16_t& number : tile) {
      seed = seed * 1664525 + 1013904223;
      number = static_cast<uint16_t>(0x3f00 + (seed >> 24) + ((seed >> 8 & 1) << 15));
    }
  }
  BATON_TILE_LOAD(4, numbers[0], kLine);
  BATON_TILE_LOAD(5, numbers[1], kLine);
  BATON_TILE_LOAD(6, numbers[2], kLine);
  BATON_TILE_LOAD(7, numbers[3], kLine);
  for (int64_t i = 0; i < iterations; ++i) {
    BATON_TILE_DOT(0, 4, 6);
    BATON_TILE_DOT(1, 4, 7);
    BATON_TILE_DOT(2, 5, 6);
    BATON_TILE_DOT(3, 5, 7);
  }
  return 4.0 * 2.0 * kTile * kTile * 32 * static_cast<double>(iterations);
}

}  // namespace

std::string_view why_no_amx() {
  static const std::string_view why = ask_for_tiles();
  return why;
}

BATON_TILES void multiply_tiles(const AmxBlock& x) {
  TileUnit unit;
  const size_t strip = static_cast<size_t>(x.steps) * kTileElements;
  const size_t panel = 2 * strip;
  const int pieces = (x.steps + kStepsAtOnce - 1) / kStepsAtOnce;
  for (int piece = 0; piece < pieces; ++piece) {
    const int step = x.steps * piece / pieces;
    const int steps = x.steps * (piece + 1) / pieces - step;
    const bool load_c = x.accumulate || step > 0;
    const uint16_t* a = x.a + static_cast<size_t>(step) * kTileElements;
    const uint16_t* b = x.b + static_cast<size_t>(step) * 2 * kTileElements;
    // The rows of A stay in L1, the panels of B in L2, and C is written along its rows.
    for (int row = 0; row < x.rows; row += 2 * kTile) {
      const int upper = std::min(kTile, x.rows - row);
      const int lower = std::clamp(x.rows - row - kTile, 0, kTile);
      const uint16_t* rows = a + static_cast<size_t>(row / kTile) * strip;
      const uint16_t* columns = b;
      float* c = x.c + static_cast<size_t>(row) * x.ldc;
      int column = 0;
      for (; lower == 0 && column + 2 * kPanel <= x.columns; column += 2 * kPanel) {
        unit.become({{upper, 0}, {kTile, kTile}, true});
        wide(rows, columns, panel, steps, c + column, x.ldc, load_c);
        columns += 2 * panel;
      }
      for (; column < x.columns; column += kPanel, columns += panel) {
        const int left = std::min(kTile, x.columns - column);
        const int right = std::clamp(x.columns - column - kTile, 0, kTile);
        unit.become({{upper, lower}, {left, right}, false});
        if (lower > 0 && right > 0) {
          few<2, 2>(rows, strip, columns, steps, c + column, x.ldc, load_c);
        } else if (lower > 0) {
          few<2, 1>(rows, strip, columns, steps, c + column, x.ldc, load_c);
        } else if (right > 0) {
          few<1, 2>(rows, strip, columns, steps, c + column, x.ldc, load_c);
        } else {
          few<1, 1>(rows, strip, columns, steps, c + column, x.ldc, load_c);
        }
      }
    }
  }
}

double measure_amx_peak(ComputePool& pool, int64_t iterations) {
  std::atomic<double> operations{0.0};
  const auto start = std::chrono::steady_clock::now();
  pool.parallel_for(pool.size(),
                    [&](int64_t, int) { operations.fetch_add(run_registers(iterations)); });
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  return operations.load() / seconds.count();
}

#else

std::string_view why_no_amx() { return "the processor is not an x86-64 one"; }
void multiply_tiles(const AmxBlock&) {}
double measure_amx_peak(ComputePool&, int64_t) { return 0; }

#endif

bool amx_usable() { return why_no_amx().empty(); }

}  // namespace baton::engine
