// The tuner door: how NCCL runs a collective, where the user has measured better than NCCL
// predicts.
//
// BATON_NCCL_TUNING names a file of rows, the first that fits counts:
//
//   # collective  bytes from  to (or -)  algorithm  protocol  channels (or -)  chunk bytes (or -)
//   allreduce     0           65536      tree       ll128     4                -
//
// Without it, and where no row fits or NCCL cannot use what the row says, NCCL's choice stays: its
// prediction knows this network by the speed and the latency that the net door reports.
#include <array>
#include <cstdlib>
#include <fstream>
#include <optional>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "plugins/nccl/abi_tools.h"
#include "plugins/nccl/plugin.h"

namespace baton::nccl {
namespace tuning {
namespace {

constexpr const char* kVariable = "BATON_NCCL_TUNING";
constexpr std::array kCollectives = {"broadcast", "reduce", "allgather", "reducescatter",
                                     "allreduce"};
constexpr std::array kAlgorithms = {"tree",     "ring", "collnetdirect", "collnetchain", "nvls",
                                    "nvlstree", "pat"};
constexpr std::array kProtocols = {"ll", "ll128", "simple"};

struct Row {
  int collective = 0, algorithm = 0, protocol = 0;
  size_t from = 0, to = SIZE_MAX;
  std::optional<int> channels;
  std::optional<size_t> chunk;
};
struct Rows {
  std::vector<Row> rows;
  const Row* find(int collective, size_t bytes) const {
    for (const Row& row : rows) {
      if (row.collective == collective && row.from <= bytes && bytes <= row.to) return &row;
    }
    return nullptr;
  }
};

template <typename Names>
int place_of(const Names& names, const std::string& name) {
  for (size_t i = 0; i < names.size(); ++i) {
    if (name == names[i]) return static_cast<int>(i);
  }
  return -1;
}

// False if the text is neither a number nor "-".
template <typename Number>
bool read(const std::string& text, Number& out) {
  uint64_t number = 0;
  if (text == "-") return true;
  if (!absl::SimpleAtoi(text, &number)) return false;
  out = number;
  return true;
}

absl::StatusOr<Row> parse(const std::vector<std::string>& words) {
  Row row;
  if (words.size() != 7) return absl::InvalidArgumentError("a row has 7 columns");
  if ((row.collective = place_of(kCollectives, words[0])) < 0) {
    return absl::InvalidArgumentError(absl::StrCat("there is no collective ", words[0]));
  }
  if ((row.algorithm = place_of(kAlgorithms, words[3])) < 0) {
    return absl::InvalidArgumentError(absl::StrCat("there is no algorithm ", words[3]));
  }
  if ((row.protocol = place_of(kProtocols, words[4])) < 0) {
    return absl::InvalidArgumentError(absl::StrCat("there is no protocol ", words[4]));
  }
  uint64_t channels = 0;
  if (!read(words[1], row.from) || !read(words[2], row.to) || !read(words[5], channels) ||
      !read(words[6], row.chunk) || row.from > row.to || channels > 1024) {
    return absl::InvalidArgumentError("a number is out of range");
  }
  if (channels > 0) row.channels = static_cast<int>(channels);
  return row;
}

absl::StatusOr<Rows> read_rows() {
  Rows rows;
  const char* const path = std::getenv(kVariable);
  if (path == nullptr || *path == 0) return rows;
  std::ifstream file(path);
  if (!file) {
    return absl::InvalidArgumentError(absl::StrCat(kVariable, "=", path, " cannot be read"));
  }
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    line.resize(std::min(line.size(), line.find('#')));
    const std::vector<std::string> words =
        absl::StrSplit(line, absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
    if (words.empty()) continue;
    absl::StatusOr<Row> row = parse(words);
    if (!row.ok()) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s=%s, line %d: %s", kVariable, path, number, row.status().message()));
    }
    rows.rows.push_back(*row);
  }
  Plugin::get().say(LogLevel::kInfo, absl::StrFormat("tuner: %u rows of %s, else NCCL's choice",
                                                     rows.rows.size(), path));
  return rows;
}

Result init(void** context, uint64_t, size_t, size_t, Logger log, NvlDomains*, TunerConstants*) {
  Plugin::get().set_logger(log);
  if (context == nullptr) return Result::kInvalidArgument;
  absl::StatusOr<Rows> rows = read_rows();
  if (!rows.ok()) return fail("tuner", rows.status());
  *context = new Rows(*std::move(rows));
  return Result::kSuccess;
}

Result choose(void* context, int collective, size_t bytes, int, float** costs, int algorithms,
              int protocols, int, int* channels) {
  if (context == nullptr || costs == nullptr) return Result::kInvalidArgument;
  const Row* const row = static_cast<Rows*>(context)->find(collective, bytes);
  if (row == nullptr || row->algorithm >= algorithms || row->protocol >= protocols) {
    return Result::kSuccess;
  }
  // NCCL passes one contiguous array, whatever the type says.
  float& cost = reinterpret_cast<float*>(costs)[row->algorithm * protocols + row->protocol];
  if (cost < 0) return Result::kSuccess;
  cost = 0;
  if (row->channels.has_value() && channels != nullptr) *channels = *row->channels;
  return Result::kSuccess;
}

Result chunk(void* context, int collective, size_t bytes, int algorithm, int protocol, int,
             size_t* out) {
  if (context == nullptr || out == nullptr) return Result::kInvalidArgument;
  const Row* const row = static_cast<Rows*>(context)->find(collective, bytes);
  if (row != nullptr && row->chunk.has_value() && row->algorithm == algorithm &&
      row->protocol == protocol) {
    *out = *row->chunk;
  }
  return Result::kSuccess;
}

Result finalize(void* context) {
  delete static_cast<Rows*>(context);
  return Result::kSuccess;
}

}  // namespace
}  // namespace tuning

extern "C" __attribute__((visibility("default")))
const TunerV5 ncclTunerPlugin_v5 = {"Baton", tuning::init, tuning::choose, tuning::finalize};
extern "C" __attribute__((visibility("default"))) const TunerV6 ncclTunerPlugin_v6 = {
    "Baton", tuning::init, tuning::choose, tuning::finalize, tuning::chunk};

}  // namespace baton::nccl
