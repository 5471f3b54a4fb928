// The other machine's shell, packet counters, and the lateness of the clock.
#include "tests/softroce/rig.h"

#include "absl/strings/str_cat.h"
#include "tests/std.h"

namespace baton::softroce {
namespace {

constexpr Time kRigPatience = std::chrono::seconds(30);
constexpr Time kTick = std::chrono::milliseconds(5);

void nap(Time time) { std::this_thread::sleep_for(time); }

}  // namespace

Time now() { return std::chrono::steady_clock::now().time_since_epoch(); }

absl::Status run_here(const std::string& command) {
  const int status = std::system(command.c_str());
  if (status == 0) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("\"", command, "\" ended with ", status));
}

absl::StatusOr<std::string> Board::read(const std::string& name, Time patience) const {
  const std::string file = path_ + "/" + name;
  for (const Time until = now() + patience; now() < until; nap(std::chrono::milliseconds(5))) {
    std::ifstream in(file);
    if (!in) continue;
    return std::string(std::istreambuf_iterator<char>(in), {});
  }
  return absl::DeadlineExceededError("nobody wrote " + file);
}

absl::Status Board::write(const std::string& name, const std::string& text) const {
  const std::string file = path_ + "/" + name;
  {
    std::ofstream out(file + ".new");
    out << text;
    if (!out.flush()) return absl::InternalError("cannot write " + file);
  }
  std::error_code error;
  std::filesystem::rename(file + ".new", file, error);
  return error ? absl::InternalError(error.message()) : absl::OkStatus();
}

absl::Status Board::ask(const std::string& name, const std::string& text) const {
  if (absl::Status status = write(name, text); !status.ok()) return status;
  const auto answer = read(name + ".done", kRigPatience);
  if (!answer.ok()) return answer.status();
  std::error_code ignored;
  std::filesystem::remove(path_ + "/" + name + ".done", ignored);
  if (*answer == "0\n") return absl::OkStatus();
  return absl::InternalError(absl::StrCat("\"", text, "\" there ended with ", *answer));
}

absl::Status Board::run_there(const std::string& command) const { return ask("do", command); }
absl::Status Board::power_off_there() const { return ask("poweroff", "now"); }

std::vector<uint64_t> packets_sent() {
  std::vector<std::string> files;
  std::error_code ignored;
  for (const auto& device : std::filesystem::directory_iterator("/sys/class/infiniband", ignored)) {
    files.push_back(device.path().string() + "/ports/1/hw_counters/sent_pkts");
  }
  std::sort(files.begin(), files.end());
  std::vector<uint64_t> counts;
  for (const std::string& file : files) {
    uint64_t count = 0;
    std::ifstream(file) >> count;
    counts.push_back(count);
  }
  return counts;
}

std::vector<int> shares(const std::vector<uint64_t>& before, const std::vector<uint64_t>& after) {
  std::vector<uint64_t> sent(std::min(before.size(), after.size()));
  for (size_t i = 0; i < sent.size(); ++i) sent[i] = after[i] - before[i];
  const uint64_t all = std::accumulate(sent.begin(), sent.end(), uint64_t{0});
  std::vector<int> out;
  for (uint64_t one : sent) out.push_back(all == 0 ? 0 : static_cast<int>(100 * one / all));
  return out;
}

Lateness::Lateness() {
  thread_ = std::thread([this] {
    while (!stop_) {
      const Time start = now();
      nap(kTick);
      took_ns_ += (now() - start).count();
      asked_ns_ += kTick.count();
    }
  });
}

Lateness::~Lateness() {
  stop_ = true;
  thread_.join();
}

void Lateness::begin() {
  took_ns_ = 0;
  asked_ns_ = 0;
}

double Lateness::factor() const {
  const auto asked = static_cast<double>(asked_ns_.load());
  return asked == 0 ? 1 : std::max(1.0, static_cast<double>(took_ns_.load()) / asked);
}

}  // namespace baton::softroce
