// Starts workers in processes of their own.
#include "tests/conformance/children.h"

#include "tests/std.h"
#include "transport/base/child.h"
#include "transport/base/wire.h"
#include "transport/pool.h"

namespace baton {
namespace {

constexpr const char* kServe = "--serve";
constexpr int kPipe = 3;

// In the child: a worker, one region, and progress until the end.
[[noreturn]] void serve(int out, const WorkerOptions& options, uint8_t seed) {
  auto worker = Worker::create(options);
  if (!worker.ok()) _exit(1);
  auto pool = MemoryPool::create(**worker, {.slab_bytes = kChildBytes});
  if (!pool.ok()) _exit(2);
  auto block = (*pool)->allocate(kChildBytes);
  if (!block.ok()) _exit(3);
  std::memset(block->data, seed, kChildBytes);
  auto remote = (*worker)->remote_region(block->region);
  if (!remote.ok()) _exit(4);
  std::string message;
  base::put_number(message, static_cast<uint32_t>((*worker)->address().size()));
  message += (*worker)->address() + remote->encode();
  if (write(out, message.data(), message.size()) != static_cast<ssize_t>(message.size())) _exit(5);
  close(out);
  (void)(*worker)->wait_until([] { return false; });
  _exit(6);
}

std::string read_exactly(int fd, size_t bytes) {
  std::string out(bytes, '\0');
  for (size_t got = 0; got < bytes;) {
    const ssize_t n = read(fd, out.data() + got, bytes - got);
    if (n <= 0) return "";
    got += static_cast<size_t>(n);
  }
  return out;
}

}  // namespace

WorkerOptions process_options(const std::string& provider, const std::string& name,
                              const std::string& secret) {
  WorkerOptions options;
  options.name = name;
  options.providers = {provider};
  options.key = *ClusterKey::from_bytes(secret);
  return options;
}

Child::Child(const std::string& provider, const std::string& name, uint8_t seed,
             const std::string& secret, uint16_t port) {
  int fds[2];
  if (pipe2(fds, O_CLOEXEC) != 0) return;
  std::string values = std::to_string(seed);
  const std::string where = std::to_string(port);
  std::vector<const char*> args = {"/proc/self/exe", kServe,         provider.c_str(), name.c_str(),
                                   secret.c_str(),   values.c_str(), where.c_str(),    nullptr};
  pid_ = base::fork_child();
  if (pid_ == 0) {  // nothing but the end of the pipe goes along
    dup2(fds[1], kPipe);
    close_range(kPipe + 1, ~0u, 0);
    execv(args[0], const_cast<char**>(args.data()));
    _exit(7);
  }
  close(fds[1]);
  const std::string length = read_exactly(fds[0], sizeof(uint32_t));
  if (!length.empty()) {
    address_ = read_exactly(fds[0], base::WireReader(length).number<uint32_t>());
    auto region = RemoteRegion::decode(read_exactly(fds[0], RemoteRegion::kEncodedBytes));
    if (region.ok()) region_ = *region;
  }
  close(fds[0]);
}

void Child::serve_if_asked(int argc, char** argv) {
  if (argc != 7 || std::string_view(argv[1]) != kServe) return;
  WorkerOptions options = process_options(argv[2], argv[3], argv[4]);
  options.listen_port = static_cast<uint16_t>(std::stoi(argv[6]));
  serve(kPipe, options, static_cast<uint8_t>(std::stoi(argv[5])));
}

Child::~Child() { kill(); }

void Child::signal(int number) const {
  if (pid_ > 0) ::kill(pid_, number);
}

void Child::kill() {
  if (pid_ <= 0) return;
  ::kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

}  // namespace baton
