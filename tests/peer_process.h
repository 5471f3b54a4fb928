// A program that a test starts, listens to and kills.
#pragma once

#include "tests/test.h"
#include "transport/base/child.h"

namespace baton {

class PeerProcess {
 public:
  explicit PeerProcess(const char* program, std::vector<std::string> arguments = {}) {
    arguments.insert(arguments.begin(), program);
    std::vector<char*> words;
    for (std::string& each : arguments) words.push_back(each.data());
    words.push_back(nullptr);
    int up[2], down[2];
    EXPECT_EQ(pipe2(up, O_CLOEXEC), 0);
    EXPECT_EQ(pipe2(down, O_CLOEXEC), 0);
    pid_ = base::fork_child();
    if (pid_ == 0) {
      dup2(down[0], 0);
      dup2(up[1], 1);
      execv(program, words.data());
      _exit(127);
    }
    close(up[1]);
    close(down[0]);
    out_ = fdopen(up[0], "r");
    in_ = down[1];
  }
  PeerProcess(const char* program, const char* argument)
      : PeerProcess(program, std::vector<std::string>{argument}) {}
  ~PeerProcess() {
    kill_it();
    fclose(out_);
    close(in_);
  }
  PeerProcess(const PeerProcess&) = delete;
  PeerProcess& operator=(const PeerProcess&) = delete;

  std::string line() {
    char text[4096] = "";
    if (fgets(text, sizeof text, out_) == nullptr) return "";
    text[strcspn(text, "\n")] = 0;
    return text;
  }
  // A line that it reads from its standard input.
  void say(const std::string& text) const {
    const std::string line = text + "\n";
    EXPECT_EQ(write(in_, line.data(), line.size()), static_cast<ssize_t>(line.size()));
  }
  // All of its threads stand when this returns: a busy machine lets some go on after the signal.
  void stop() const {
    kill(pid_, SIGSTOP);
    waitpid(pid_, nullptr, WUNTRACED);
  }
  void go_on() const { kill(pid_, SIGCONT); }
  void kill_it(int signal = SIGKILL) {
    if (pid_ <= 0) return;
    kill(pid_, signal);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  pid_t pid_ = -1;
  FILE* out_ = nullptr;
  int in_ = -1;
};

}  // namespace baton
