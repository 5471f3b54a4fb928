// kv_file_bw: writes a tier's file, then reads it in turns with fio.
#include "bench/kv/kv_bw.h"

#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/report/child_process.h"
#include "bench/report/report.h"
#include "engine/command_line/command_line.h"
#include "engine/command_line/values.h"
#include "kvtransfer/tiers/disk_tier.h"
#include "kvtransfer/tiers/file_reader.h"
#include "transport/base/splitmix.h"
#include "transport/base/unique_fd.h"

namespace baton::bench {
namespace {

using namespace kvtransfer::tiers;

constexpr const char* kCommand = "baton kv_file_bw";
constexpr std::chrono::milliseconds kPause(500);

struct Options {
  std::string directory = ".";
  size_t bytes = size_t{1} << 30;
  // What a tier reads at a time of a block: TierStoreOptions::part_bytes.
  size_t record_bytes = size_t{256} << 10;
  int rounds = 5;
  bool io_uring = true;
  std::string json;
};

// A folder that is gone when the benchmark is.
class Folder {
 public:
  explicit Folder(const std::string& in)
      : path_(absl::StrCat(in, "/baton-kv-file-bw-", getpid())) {}
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  const std::string& path() const { return path_; }
  // The one file in it.
  std::string file() const {
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator(path_, ignored)) {
      return entry.path().string();
    }
    return "";
  }

 private:
  std::string path_;
};

class FileBench {
 public:
  explicit FileBench(const Options& options)
      : options_(options),
        folder_(options.directory),
        shape_{.parts = 1, .part_bytes = static_cast<uint32_t>(options.record_bytes - kPage)} {}

  absl::Status prepare();
  // One reading of all records by each, in turns. What fio cannot do is said once.
  absl::Status round(int number);
  int report() const;

 private:
  absl::StatusOr<double> read_alone();
  absl::StatusOr<double> read_checked();
  absl::StatusOr<double> read_by_fio(int number);
  size_t bytes() const { return pins_.size() * shape_.record_bytes(); }
  double gb_per_s(Time took) const {
    return static_cast<double>(bytes()) / static_cast<double>(took.count());
  }
  Row row(const std::string& reader, const std::vector<double>& rates) const;

  const Options& options_;
  Folder folder_;
  const TierShape shape_;
  std::unique_ptr<DiskTier> tier_;
  base::UniqueFd file_;
  std::unique_ptr<FileReader> reader_;
  std::string no_ring_;
  std::string no_fio_;
  std::vector<DiskTier::Pin> pins_;  // in the order of reading
  std::vector<double> alone_, checked_, fio_, ratios_, checked_ratios_;
};

absl::Status FileBench::prepare() {
  auto tier = DiskTier::open({.directory = folder_.path(),
                              .bytes = options_.bytes,
                              .shape = shape_,
                              .io_uring = options_.io_uring});
  if (!tier.ok()) return tier.status();
  tier_ = *std::move(tier);
  const TierKeys keys({.weights = kCommand, .dtype = "bf16"});
  const std::shared_ptr<TierRecord> record = TierRecord::make(shape_);
  if (record == nullptr) return absl::ResourceExhaustedError("no memory for a record");
  std::vector<TierKey> all;
  for (size_t i = 0; i < tier_->capacity(); ++i) {
    // Every page differs, so that nothing below can keep it once.
    for (size_t at = 0; at + sizeof(uint64_t) <= shape_.part_bytes; at += kPage) {
      const uint64_t value = base::splitmix(i * 1000003 + at);
      std::memcpy(record->part(0).data() + at, &value, sizeof(value));
    }
    all.push_back(keys.key(std::to_string(i)));
    record->seal(all.back(), i + 1);
    if (absl::Status status = tier_->put(*record); !status.ok()) return status;
  }
  std::shuffle(all.begin(), all.end(), std::mt19937_64(1));
  for (const TierKey& key : all) {
    const auto pin = tier_->pin(key);
    if (!pin.has_value()) return absl::DataLossError("a record that was written is missing");
    pins_.push_back(*pin);
  }
  const std::string path = folder_.file();
  file_.reset(::open(path.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC));
  if (!file_.valid()) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " cannot be read past the page cache (", std::strerror(errno),
                     "): give --directory on a disk whose file system has O_DIRECT"));
  }
  if (options_.io_uring) reader_ = make_ring_reader(file_.get(), shape_.record_bytes(), &no_ring_);
  if (reader_ == nullptr) reader_ = make_thread_reader(file_.get(), shape_.record_bytes());
  if (reader_ == nullptr) return absl::ResourceExhaustedError("no memory or threads for reading");
  std::printf("# %s\n", tier_->explain().c_str());
  return absl::OkStatus();
}

absl::StatusOr<double> FileBench::read_alone() {
  std::vector<FileRead> reads;
  for (const DiskTier::Pin& pin : pins_) {
    reads.push_back({uint64_t{pin.slot} * shape_.record_bytes(), shape_.record_bytes()});
  }
  std::atomic<size_t> whole{0};
  const Time begin = Clock::steady().now();
  reader_->read(reads, [&](size_t, std::span<const std::byte> bytes) { whole += !bytes.empty(); });
  const Time took = Clock::steady().now() - begin;
  if (whole != reads.size()) return absl::DataLossError("reads of the file failed");
  return gb_per_s(took);
}

absl::StatusOr<double> FileBench::read_checked() {
  std::vector<DiskTier::Pin*> pins;
  for (DiskTier::Pin& pin : pins_) pins.push_back(&pin);
  std::atomic<size_t> right{0};
  const Time begin = Clock::steady().now();
  tier_->read(pins, 0, [&](size_t, std::span<const std::byte> bytes) { right += !bytes.empty(); });
  const Time took = Clock::steady().now() - begin;
  if (right != pins.size()) return absl::DataLossError("records differ from what was written");
  return gb_per_s(took);
}

absl::StatusOr<double> FileBench::read_by_fio(int number) {
  const auto flag = [](const char* name, auto value) {
    return absl::StrCat("--", name, "=", value);
  };
  const std::string file = folder_.file();
  const auto output = output_of(
      -1,
      {"fio", "--name=kv", "--readonly", "--rw=randread", flag("filename", file),
       flag("bs", shape_.record_bytes()), flag("size", bytes()), flag("randseed", number + 1),
       "--direct=1", "--ioengine=io_uring", "--fixedbufs=1", "--registerfiles=1",
       flag("iodepth", kReadDepth), flag("iodepth_batch_submit", kReadDepth),
       "--iodepth_batch_complete_min=1", flag("iodepth_batch_complete_max", kReadDepth),
       "--gtod_reduce=1", "--thread", "--output-format=json"},
      {}, patient(std::chrono::seconds(300)));
  if (!output.ok()) return output.status();
  const size_t begin = output->find('{');  // it may warn first
  const Json said = Json::parse(begin == std::string::npos ? "" : output->substr(begin), nullptr,
                                /*allow_exceptions=*/false);
  try {
    const Json& read = said.at("jobs").at(0).at("read");
    if (read.at("io_bytes").get<size_t>() != bytes()) {
      return absl::UnavailableError("fio did not read the whole file");
    }
    return static_cast<double>(bytes()) / (read.at("runtime").get<double>() * 1e6);
  } catch (const Json::exception& error) {
    return absl::UnavailableError(absl::StrCat("cannot parse fio's JSON: ", error.what()));
  }
}

absl::Status FileBench::round(int number) {
  std::optional<double> rates[3];
  for (int i = 0; i < 3; ++i) {
    const int who = (i + number) % 3;  // each is the first now and then
    if (who == 2 && !no_fio_.empty()) continue;
    // A shared disk favours a process that has just paused, as fio does while it starts.
    std::this_thread::sleep_for(kPause);
    const auto rate = who == 0 ? read_alone() : who == 1 ? read_checked() : read_by_fio(number);
    if (who == 2 && !rate.ok()) {
      no_fio_ = std::string(rate.status().message());
      continue;
    }
    if (!rate.ok()) return rate.status();
    rates[who] = *rate;
  }
  alone_.push_back(*rates[0]);
  checked_.push_back(*rates[1]);
  if (rates[2].has_value()) {
    fio_.push_back(*rates[2]);
    ratios_.push_back(*rates[0] / *rates[2]);
    checked_ratios_.push_back(*rates[1] / *rates[2]);
  }
  return absl::OkStatus();
}

Row FileBench::row(const std::string& reader, const std::vector<double>& rates) const {
  Row row;
  row.bench = "kv_file_bw";
  row.params = {
      {"record_bytes", shape_.record_bytes()}, {"records", pins_.size()}, {"depth", kReadDepth}};
  row.route = reader;
  row.bytes = bytes();
  row.pieces = pins_.size();
  row.gb_per_s = Rate::of(rates);
  row.seconds = static_cast<double>(bytes()) / (row.gb_per_s.median * 1e9);
  if (!fio_.empty()) row.floor = {.name = "fio", .gb_per_s = Rate::of(fio_).median, .note = ""};
  row.verified = true;  // the tier has checked every record's sum in this run
  return row;
}

int FileBench::report() const {
  Table table({"read by", "GB/s", "least", "most", "of fio, same round"});
  const auto add = [&](const std::string& name, const std::vector<double>& rates,
                       const std::vector<double>& ratios) {
    const Rate rate = Rate::of(rates);
    const auto two = [](double value) {
      char text[32];
      std::snprintf(text, sizeof text, "%.2f", value);
      return std::string(text);
    };
    table.add({name, two(rate.median), two(rate.min), two(rate.max),
               ratios.empty() ? "" : two(Rate::of(ratios).median)});
  };
  add(reader_->name(), alone_, ratios_);
  add(reader_->name() + ", sums checked", checked_, checked_ratios_);
  if (!fio_.empty()) add("fio", fio_, {});
  std::fputs(table.text().c_str(), stdout);
  if (!no_ring_.empty()) std::printf("without io_uring: %s\n", no_ring_.c_str());
  if (!no_fio_.empty()) {
    std::printf("without fio: %s (Debian: fio; ./run install-deps all installs it)\n",
                no_fio_.c_str());
  }
  if (options_.json.empty()) return 0;
  const absl::Status status =
      write_json(options_.json,
                 {row(reader_->name(), alone_), row(reader_->name() + ", sums checked", checked_)});
  if (!status.ok())
    std::fprintf(stderr, "%s: %s\n", kCommand, std::string(status.message()).c_str());
  return status.ok() ? 0 : 1;
}

int run(const Options& options) {
  FileBench bench(options);
  absl::Status status = bench.prepare();
  for (int i = 0; status.ok() && i < options.rounds; ++i) status = bench.round(i);
  if (!status.ok()) {
    std::fprintf(stderr, "%s: %s\n", kCommand, std::string(status.message()).c_str());
    return 1;
  }
  return bench.report();
}

}  // namespace

int kv_file_bw_main(int argc, char** argv) {
  namespace values = engine::command_line;
  Options options;
  CLI::App app("Records of a KV tier on disk, read in random order, in turns with fio.");
  app.add_option("--directory", options.directory, "folder for the file, which is removed again")
      ->check(values::writable_folder())
      ->type_name("DIR")
      ->capture_default_str();
  app.add_option("--bytes", options.bytes, "of the file")
      ->transform(values::byte_size())
      ->default_str("1G");
  app.add_option("--record-bytes", options.record_bytes, "bytes per read, in whole pages of 4 KiB")
      ->transform(values::byte_size())
      ->default_str("256K");
  app.add_option("--rounds", options.rounds, "rounds of all, in turns")
      ->check(values::whole_number(1, 1000))
      ->capture_default_str();
  app.add_flag("!--no-io-uring", options.io_uring, "read by threads that call pread()");
  app.add_option("--json", options.json, "write one JSON object per row")
      ->check(values::writable_file())
      ->type_name("FILE");
  if (const int status = values::parse(app, kCommand, argc, argv); status >= 0) return status;
  if (options.record_bytes < 2 * kPage || options.record_bytes % kPage != 0 ||
      options.record_bytes > size_t{1} << 30) {
    std::fprintf(stderr, "%s: --record-bytes: is a multiple of 4K, from 8K to 1G\n", kCommand);
    return values::kUsage;
  }
  if (options.bytes < options.record_bytes) {
    std::fprintf(stderr, "%s: --bytes: has no room for one record: give it more\n", kCommand);
    return values::kUsage;
  }
  return run(options);
}

}  // namespace baton::bench
