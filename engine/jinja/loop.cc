// Loops and cycles.
#include "engine/jinja/loop.h"

#include "engine/jinja/arguments.h"

namespace baton::engine::jinja {
const std::optional<Value>& Loop::peek() {
  if (!peeked_ || !after_.has_value()) {
    Value one;
    peeked_ = true;
    after_ = next_(one) ? std::optional<Value>(one) : std::nullopt;
  }
  return after_;
}

bool Loop::advance(Value& out) {
  if (peeked_ && after_.has_value()) {
    out = *std::exchange(after_, std::nullopt);
  } else if (!next_(out)) {
    return false;
  }
  peeked_ = false;
  ++index0_;
  before_ = std::exchange(current_, out);
  return true;
}

void Loop::forget() {
  changed_.reset();
  before_ = current_ = Value();
}

std::optional<int64_t> Loop::length() {
  if (length_.has_value()) return length_;
  length_ = source_.length();
  if (!length_.has_value()) {
    Values rest;
    for (Value one; next_(one);) rest.push_back(one);
    length_ =
        static_cast<int64_t>(rest.size()) + index0_ + 1 + (peeked_ && after_.has_value() ? 1 : 0);
    next_ = next_of(std::move(rest));
  }
  return length_;
}

Next Loop::iterate() {
  return
      [](Value&) -> bool { throw Error("a loop that goes through its own loop is not supported"); };
}

std::string Loop::repr() const {
  return concat("<LoopContext ", index0_ + 1, "/", *const_cast<Loop*>(this)->length(), ">");
}

std::optional<Value> Loop::attribute(const std::string& name) {
  if (name == "index0") return Value(index0_);
  if (name == "index") return Value(index0_ + 1);
  if (name == "first") return Value(index0_ == 0);
  if (name == "last") return Value(!peek().has_value());
  if (name == "length") return Value(*length());
  if (name == "revindex") return Value(*length() - index0_);
  if (name == "revindex0") return Value(*length() - index0_ - 1);
  if (name == "depth0") return Value(depth_);
  if (name == "depth") return Value(depth_ + 1);
  if (name == "previtem")
    return index0_ == 0 ? Value::undefined("there is no previous item") : before_;
  if (name == "nextitem")
    return peek().has_value() ? *after_ : Value::undefined("there is no next item");
  if (name == "cycle") {
    return function("cycle", [at = index0_](const Args& args) {
      if (args.positional.empty() || !args.named.empty()) throw Error("no items for cycling given");
      return args.positional[static_cast<size_t>(at) % args.positional.size()];
    });
  }
  if (name == "changed") {
    return function("changed", [this, held = shared_from_this()](const Args& args) {
      const Value now = Tuple{.items = args.positional};
      if (changed_.has_value() && equal(*changed_, now)) return Value(false);
      changed_ = now;
      return Value(true);
    });
  }
  return std::nullopt;
}

Value Loop::call(const Args& args) {
  const Arguments given("loop", args, {"iterable"}, 1);
  if (recurse_ == nullptr)
    throw Error("The loop must have the 'recursive' marker to be called recursively.");
  return recurse_(given.at(0));
}

Cycler::Cycler(const Args& args) : items_(args.positional) {
  if (items_.empty() || !args.named.empty()) throw Error("at least one item has to be provided");
}

std::optional<Value> Cycler::attribute(const std::string& name) {
  if (name == "current") return items_[at_];
  if (name == "next") {
    return function("next", [this, held = shared_from_this()](const Args&) {
      const Value now = items_[at_];
      at_ = (at_ + 1) % items_.size();
      return now;
    });
  }
  if (name == "reset") {
    return function("reset", [this, held = shared_from_this()](const Args&) {
      at_ = 0;
      return Value(None());
    });
  }
  if (name == "items" || name == "pos") throw Error("the insides of a cycler are not supported");
  return std::nullopt;
}

}  // namespace baton::engine::jinja
