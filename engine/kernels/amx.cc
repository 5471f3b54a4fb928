// amx: permission, and the kernels in 3 x 2, 2 x 2 and 1 x 4 tiles.
#include "engine/kernels/amx.h"

#include <algorithm>

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
// A tile of sums that is stored costs as much as two products, so that is as seldom as can be:
// never, as long as three strips of A and a task's panels of B lie in L2. Of a longer k sums are
// put away behind pieces of so many steps, of which two strips of A stay in L1 while panels pass
// by.
constexpr int kStepsInL2 = 56;
constexpr int kStepsAtOnce = 9;
constexpr int64_t kLine = 64;
constexpr int kLineElements = 32;

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

// Tiles are 16 rows of 64 bytes. 3 x 2: tiles 0 to 5 are C by rows, 6 A, 7 B. 2 x 2: tiles 0 to 3
// are C by rows, 4 and 5 A, 6 and 7 B. 1 x 4: tiles 0 to 3 are C, 4 is A, 5 to 7 are B. Where all
// rows are in one strip, C and A have no more than these.
class TileUnit {
 public:
  BATON_TILES explicit TileUnit(int rows = kTile) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    for (int tile = 0; tile < 5 && rows < kTile; ++tile) {
      config.rows[tile] = static_cast<uint8_t>(rows);
    }
    asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
  }
  BATON_TILES ~TileUnit() { asm volatile("tilerelease" ::); }
  TileUnit(const TileUnit&) = delete;
  TileUnit& operator=(const TileUnit&) = delete;
};

// Some tiles of C: tile (i, j) begins at data[i * down + j * across].
struct Tiles {
  float* at(int i, int j) const { return data + i * down + j * across; }
  float* data;
  size_t down, across, row;  // from a tile to the next, and from one of its rows to the next
};

// What a group of tiles adds up, and where its sums come from and go to.
struct Group {
  const uint16_t* a;
  const uint16_t* b;
  size_t a_strip, b_panel;  // elements to the next 16 rows of A, and to the next 32 columns of B
  int steps;
  bool from_zero;
  Tiles from, to;
  // Lines of the next group of C, which will be written: they come into L2 meanwhile, so many in
  // each step. Two lie side by side in each of its rows.
  float* ahead;
  size_t ahead_row;
  int ahead_lines, ahead_at_once;
  // So many lines of B, from here on, that will be multiplied next, in each step.
  const uint16_t* later;
  int later_at_once;
};

BATON_TILES_INLINE void ask_ahead(const Group& x, int step) {
  const uint16_t* later = x.later + static_cast<size_t>(step * x.later_at_once) * kLineElements;
  for (int i = 0; i < x.later_at_once; ++i) __builtin_prefetch(later + i * kLineElements, 0, 2);
  const int first = step * x.ahead_at_once;
  const int end = std::min(first + x.ahead_at_once, x.ahead_lines);
  for (int line = first; line < end; ++line) {
    const float* at = x.ahead + static_cast<size_t>(line / 2) * x.ahead_row + line % 2 * kTile;
    asm volatile("prefetchw %0" ::"m"(*at));
  }
}

// Three strips of rows and one panel: six sums under way, of which each load of A or B serves
// nearly two. A's tiles come a second time from L1.
BATON_TILES void three(const Group& x) {
  const int64_t from = static_cast<int64_t>(x.from.row * sizeof(float));
  if (x.from_zero) {
    BATON_TILE_ZERO(0);
    BATON_TILE_ZERO(1);
    BATON_TILE_ZERO(2);
    BATON_TILE_ZERO(3);
    BATON_TILE_ZERO(4);
    BATON_TILE_ZERO(5);
  } else {
    BATON_TILE_LOAD(0, x.from.at(0, 0), from);
    BATON_TILE_LOAD(1, x.from.at(0, 1), from);
    BATON_TILE_LOAD(2, x.from.at(1, 0), from);
    BATON_TILE_LOAD(3, x.from.at(1, 1), from);
    BATON_TILE_LOAD(4, x.from.at(2, 0), from);
    BATON_TILE_LOAD(5, x.from.at(2, 1), from);
  }
  const uint16_t* a = x.a;
  const uint16_t* b = x.b;
  for (int step = 0; step < x.steps; ++step) {
    ask_ahead(x, step);
    BATON_TILE_LOAD(7, b, kLine);
    BATON_TILE_LOAD(6, a, kLine);
    BATON_TILE_DOT(0, 6, 7);
    BATON_TILE_LOAD(6, a + x.a_strip, kLine);
    BATON_TILE_DOT(2, 6, 7);
    BATON_TILE_LOAD(6, a + 2 * x.a_strip, kLine);
    BATON_TILE_DOT(4, 6, 7);
    BATON_TILE_LOAD(7, b + kTileElements, kLine);
    BATON_TILE_DOT(5, 6, 7);
    BATON_TILE_LOAD(6, a + x.a_strip, kLine);
    BATON_TILE_DOT(3, 6, 7);
    BATON_TILE_LOAD(6, a, kLine);
    BATON_TILE_DOT(1, 6, 7);
    a += kTileElements;
    b += 2 * kTileElements;
  }
  const int64_t to = static_cast<int64_t>(x.to.row * sizeof(float));
  BATON_TILE_STORE(0, x.to.at(0, 0), to);
  BATON_TILE_STORE(1, x.to.at(0, 1), to);
  BATON_TILE_STORE(2, x.to.at(1, 0), to);
  BATON_TILE_STORE(3, x.to.at(1, 1), to);
  BATON_TILE_STORE(4, x.to.at(2, 0), to);
  BATON_TILE_STORE(5, x.to.at(2, 1), to);
}

// One or two strips and one panel.
template <int kDown>
BATON_TILES void few(const Group& x) {
  const int64_t from = static_cast<int64_t>(x.from.row * sizeof(float));
  if (x.from_zero) {
    BATON_TILE_ZERO(0);
    BATON_TILE_ZERO(1);
    if constexpr (kDown > 1) {
      BATON_TILE_ZERO(2);
      BATON_TILE_ZERO(3);
    }
  } else {
    BATON_TILE_LOAD(0, x.from.at(0, 0), from);
    BATON_TILE_LOAD(1, x.from.at(0, 1), from);
    if constexpr (kDown > 1) {
      BATON_TILE_LOAD(2, x.from.at(1, 0), from);
      BATON_TILE_LOAD(3, x.from.at(1, 1), from);
    }
  }
  const uint16_t* a = x.a;
  const uint16_t* b = x.b;
  for (int step = 0; step < x.steps; ++step) {
    ask_ahead(x, step);
    BATON_TILE_LOAD(6, b, kLine);
    BATON_TILE_LOAD(4, a, kLine);
    BATON_TILE_DOT(0, 4, 6);
    BATON_TILE_LOAD(7, b + kTileElements, kLine);
    BATON_TILE_DOT(1, 4, 7);
    if constexpr (kDown > 1) {
      BATON_TILE_LOAD(5, a + x.a_strip, kLine);
      BATON_TILE_DOT(2, 5, 6);
      BATON_TILE_DOT(3, 5, 7);
    }
    a += kTileElements;
    b += 2 * kTileElements;
  }
  const int64_t to = static_cast<int64_t>(x.to.row * sizeof(float));
  BATON_TILE_STORE(0, x.to.at(0, 0), to);
  BATON_TILE_STORE(1, x.to.at(0, 1), to);
  if constexpr (kDown > 1) {
    BATON_TILE_STORE(2, x.to.at(1, 0), to);
    BATON_TILE_STORE(3, x.to.at(1, 1), to);
  }
}

// For one strip of rows B is read once, from memory: prefetch what is needed this many steps
// later. Loads of tiles alone have too few lines under way.
constexpr int kStepsAhead = 12;

BATON_TILES_INLINE void ask_for_stream(const Group& x, int step) {
  const int later = step + kStepsAhead;
  const bool here = later < x.steps;
  const uint16_t* from = x.b + (here ? 0 : 2 * x.b_panel) +
                         static_cast<size_t>(here ? later : later - x.steps) * 2 * kTileElements;
  constexpr int kLines = static_cast<int>(2 * kTileElements) / kLineElements;
  for (int i = 0; i < kLines; ++i) {
    __builtin_prefetch(from + i * kLineElements, 0, 2);
    __builtin_prefetch(from + x.b_panel + i * kLineElements, 0, 2);
  }
}

// 16 rows and two whole panels: four sums under way instead of two.
template <bool kStream>
BATON_TILES void wide(const Group& x) {
  const int64_t from = static_cast<int64_t>(x.from.row * sizeof(float));
  if (x.from_zero) {
    BATON_TILE_ZERO(0);
    BATON_TILE_ZERO(1);
    BATON_TILE_ZERO(2);
    BATON_TILE_ZERO(3);
  } else {
    BATON_TILE_LOAD(0, x.from.at(0, 0), from);
    BATON_TILE_LOAD(1, x.from.at(0, 1), from);
    BATON_TILE_LOAD(2, x.from.at(0, 2), from);
    BATON_TILE_LOAD(3, x.from.at(0, 3), from);
  }
  const uint16_t* a = x.a;
  const uint16_t* b = x.b;
  for (int step = 0; step < x.steps; ++step) {
    if constexpr (kStream) ask_for_stream(x, step);
    BATON_TILE_LOAD(4, a, kLine);
    BATON_TILE_LOAD(5, b, kLine);
    BATON_TILE_DOT(0, 4, 5);
    BATON_TILE_LOAD(6, b + kTileElements, kLine);
    BATON_TILE_DOT(1, 4, 6);
    BATON_TILE_LOAD(7, b + x.b_panel, kLine);
    BATON_TILE_DOT(2, 4, 7);
    BATON_TILE_LOAD(5, b + x.b_panel + kTileElements, kLine);
    BATON_TILE_DOT(3, 4, 5);
    a += kTileElements;
    b += 2 * kTileElements;
  }
  const int64_t to = static_cast<int64_t>(x.to.row * sizeof(float));
  BATON_TILE_STORE(0, x.to.at(0, 0), to);
  BATON_TILE_STORE(1, x.to.at(0, 1), to);
  BATON_TILE_STORE(2, x.to.at(0, 2), to);
  BATON_TILE_STORE(3, x.to.at(0, 3), to);
}

int tiles_in(int size) { return (size + kTile - 1) / kTile; }

// Some steps of k.
struct Piece {
  int first_step, steps;
  bool first, last;  // of all k
};

// What a group asks for of x.next_b: so many lines in each of its steps.
struct Later {
  const uint16_t* at = nullptr;
  int lines = 0;
};

// What of C there is of kDown x kAcross tiles, into the sums or out of them.
void copy_edge(const AmxBlock& x, const Tiles& c, const Tiles& sums, int down, int across, int row,
               int column, bool out) {
  for (int i = 0; i < down; ++i) {
    for (int j = 0; j < across; ++j) {
      const int rows = std::clamp(x.rows - (row + i) * kTile, 0, kTile);
      const int columns = std::clamp(x.columns - (column + j) * kTile, 0, kTile);
      for (int r = 0; r < rows; ++r) {
        float* in_c = c.at(i, j) + static_cast<size_t>(r) * c.row;
        float* sum = sums.at(i, j) + static_cast<size_t>(r) * sums.row;
        std::copy_n(out ? sum : in_c, columns, out ? in_c : sum);
      }
    }
  }
}

// Tiles from (row, column) on, whole panels. Sums lie in C before the first piece and behind the
// last, where C has all of the group; otherwise tile by tile in x.sums. `next`: where the next
// group of C lies that will be written, if it is as large.
template <int kDown, int kAcross>
BATON_TILES void add_group(const AmxBlock& x, const Piece& piece, int row, int column,
                           float* next = nullptr, const Later& later = {}) {
  const size_t panel = 2 * static_cast<size_t>(x.steps) * kTileElements;
  const size_t strips = static_cast<size_t>(tiles_in(x.rows));
  const Tiles c = {x.c + static_cast<size_t>(row * kTile) * x.ldc + column * kTile, kTile * x.ldc,
                   kTile, x.ldc};
  const Tiles sums = {
      x.sums + (static_cast<size_t>(column) * strips + static_cast<size_t>(row)) * kTile * kTile,
      kTile * kTile, strips * kTile * kTile, kTile};
  const bool one_strip = x.rows <= kTile;
  const bool whole =
      (one_strip || (row + kDown) * kTile <= x.rows) && (column + kAcross) * kTile <= x.columns;
  if (!whole && piece.first && x.accumulate) {
    copy_edge(x, c, sums, kDown, kAcross, row, column, false);
  }
  constexpr int kLines = 2 * kDown * kTile;  // of a group of C
  const Group group = {.a = x.a + static_cast<size_t>(row) * x.a_strip +
                            static_cast<size_t>(piece.first_step) * kTileElements,
                       .b = x.b + static_cast<size_t>(column / 2) * panel +
                            static_cast<size_t>(piece.first_step) * 2 * kTileElements,
                       .a_strip = x.a_strip,
                       .b_panel = panel,
                       .steps = piece.steps,
                       .from_zero = piece.first && !x.accumulate,
                       .from = whole && piece.first ? c : sums,
                       .to = whole && piece.last ? c : sums,
                       .ahead = next,
                       .ahead_row = x.ldc,
                       .ahead_lines = next == nullptr ? 0 : kLines,
                       .ahead_at_once = (kLines + piece.steps - 1) / piece.steps,
                       .later = later.at,
                       .later_at_once = later.lines};
  if constexpr (kAcross == 4) {
    one_strip ? wide<true>(group) : wide<false>(group);
  } else if constexpr (kDown == 3) {
    three(group);
  } else {
    few<kDown>(group);
  }
  if (!whole && piece.last) copy_edge(x, c, sums, kDown, kAcross, row, column, true);
}

// kDown strips, all panels. `next_row`: the strips that come behind them, if they are as many.
template <int kDown>
BATON_TILES void add_strips(const AmxBlock& x, const Piece& piece, int row, int next_row) {
  const int columns = tiles_in(x.columns);
  // All strips ask for a part of the panel's next piece of k, or of the next task's panel.
  const size_t panel = 2 * static_cast<size_t>(x.steps) * kTileElements;
  const uint16_t* later = piece.last ? x.next_b : x.b + size_t{2} * kTileElements * piece.steps;
  const int parts = piece.last ? x.next_parts : 1, part = piece.last ? x.next_part : 0;
  constexpr int kLines = 2 * kTile;  // of a panel in each step
  const int groups = std::max(1, tiles_in(x.rows) / kDown), all = groups * parts;
  const int lines = later == nullptr ? 0 : (kLines + all - 1) / all;
  const size_t place = static_cast<size_t>(part * groups + row / kDown) *
                       static_cast<size_t>(lines * piece.steps) * kLineElements;
  for (int column = 0; column < columns; column += 2) {
    const bool turns = column + 2 >= columns;
    const int to_row = turns ? next_row : row, to_column = turns ? 0 : column + 2;
    const bool asks = (piece.last || (piece.first && x.accumulate)) &&
                      (to_row + kDown) * kTile <= x.rows && (to_column + 2) * kTile <= x.columns;
    add_group<kDown, 2>(
        x, piece, row, column,
        asks ? x.c + static_cast<size_t>(to_row * kTile) * x.ldc + to_column * kTile : nullptr,
        {.at = lines == 0 ? nullptr
                          : later + static_cast<size_t>(column / 2) * panel + place +
                                static_cast<size_t>(piece.first_step) * 2 * kTileElements,
         .lines = lines});
  }
}

// One strip, alone or left over.
BATON_TILES void add_strip(const AmxBlock& x, const Piece& piece, int row) {
  const int columns = tiles_in(x.columns);
  int column = 0;
  for (; column + 4 <= columns; column += 4) add_group<1, 4>(x, piece, row, column);
  for (; column < columns; column += 2) add_group<1, 2>(x, piece, row, column);
}

}  // namespace

std::string_view why_no_amx() {
  static const std::string_view why = ask_for_tiles();
  return why;
}

BATON_TILES void multiply_tiles(const AmxBlock& x) {
  const TileUnit unit(std::min(x.rows, kTile));
  const int rows = tiles_in(x.rows);
  const bool is_long = rows > 1 && x.steps > kStepsInL2;
  const int pieces = is_long ? (x.steps + kStepsAtOnce - 1) / kStepsAtOnce : 1;
  for (int i = 0; i < pieces; ++i) {
    const int step = x.steps * i / pieces;
    const Piece piece = {step, x.steps * (i + 1) / pieces - step, i == 0, i + 1 == pieces};
    int row = 0;
    // Four are two and two: one alone has too few sums under way.
    for (; !is_long && rows - row >= 3 && rows - row != 4; row += 3)
      add_strips<3>(x, piece, row, row + 3);
    for (; rows - row >= 2; row += 2) add_strips<2>(x, piece, row, row + 2);
    if (row < rows) add_strip(x, piece, row);
  }
}

#else

std::string_view why_no_amx() { return "the processor is not an x86-64 one"; }
void multiply_tiles(const AmxBlock&) {}

#endif

bool amx_usable() { return why_no_amx().empty(); }

}  // namespace baton::engine
