// What a kernel call needs around it on a real GPU: device copies of host arrays with guards behind them, a
// plain launch or the replay of a captured CUDA graph, and the first error in words.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cuda_runtime.h>
#include <stdexcept>
#include <string>
#include <vector>

namespace harness {

inline void must(cudaError_t status, const char *what) {
  if (status != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(status) + ", " +
                             cudaGetErrorString(status));
}

// Device memory of a size and, behind it, bytes that nothing may write.
class Buffer {
public:
  explicit Buffer(size_t bytes) : bytes_(bytes) {
    must(cudaMalloc(&data_, bytes + kGuard), "cudaMalloc");
    must(cudaMemset(data_, kPoison, bytes + kGuard), "cudaMemset");
  }
  Buffer(const Buffer &) = delete;
  Buffer &operator=(const Buffer &) = delete;
  ~Buffer() { cudaFree(data_); }

  void *data() const { return data_; }
  size_t bytes() const { return bytes_; }

  void check_guard(const char *name) const {
    std::vector<unsigned char> guard(kGuard);
    const char *end = static_cast<const char *>(data_) + bytes_;
    must(cudaMemcpy(guard.data(), end, kGuard, cudaMemcpyDeviceToHost), "cudaMemcpy of a guard");
    for (unsigned char byte : guard)
      if (byte != kPoison)
        throw std::runtime_error(std::string("write past the end of ") + name);
  }

private:
  static constexpr size_t kGuard = 4096;
  static constexpr unsigned char kPoison = 0xFF;
  size_t bytes_;
  void *data_ = nullptr;
};

// The arrays of one call: params pointers are replaced by device addresses and outputs copied back.
class Arrays {
public:
  explicit Arrays(size_t count) { entries_.reserve(count); }
  Arrays(const Arrays &) = delete;
  Arrays &operator=(const Arrays &) = delete;
  ~Arrays() {
    for (Entry &entry : entries_)
      delete entry.buffer;
  }

  template <class T> void input(T *&pointer, size_t bytes, const char *name) {
    add(const_cast<void *>(static_cast<const void *>(pointer)), bytes, name, false);
    pointer = static_cast<T *>(last(pointer != nullptr));
  }
  template <class T> void output(T *&pointer, size_t bytes, const char *name) {
    add(pointer, bytes, name, true);
    pointer = static_cast<T *>(last(pointer != nullptr));
  }
  void upload() const {
    for (const Entry &entry : entries_)
      must(cudaMemcpy(entry.buffer->data(), entry.host, entry.buffer->bytes(), cudaMemcpyHostToDevice),
           entry.name);
  }
  void download() const {
    for (const Entry &entry : entries_) {
      entry.buffer->check_guard(entry.name);
      if (entry.is_output)
        must(cudaMemcpy(entry.host, entry.buffer->data(), entry.buffer->bytes(), cudaMemcpyDeviceToHost),
             entry.name);
    }
  }

private:
  struct Entry {
    void *host;
    const char *name;
    bool is_output;
    Buffer *buffer;
  };
  void add(void *host, size_t bytes, const char *name, bool is_output) {
    if (host)
      entries_.push_back({host, name, is_output, new Buffer(bytes)});
  }
  void *last(bool present) const { return present ? entries_.back().buffer->data() : nullptr; }

  std::vector<Entry> entries_;
};

class Stream {
public:
  Stream() { must(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate"); }
  Stream(const Stream &) = delete;
  Stream &operator=(const Stream &) = delete;
  ~Stream() { cudaStreamDestroy(stream_); }
  cudaStream_t get() const { return stream_; }

private:
  cudaStream_t stream_ = nullptr;
};

// Captures what `launch` enqueues and runs it `replays` times. Returns the launcher's status.
template <class F> int replay(cudaStream_t stream, int replays, F launch) {
  must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
  const int status = launch(stream);
  cudaGraph_t graph = nullptr;
  must(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  cudaGraphExec_t exec = nullptr;
  const cudaError_t instantiated = cudaGraphInstantiate(&exec, graph, 0);
  cudaGraphDestroy(graph);
  must(instantiated, "cudaGraphInstantiate");
  cudaError_t launched = cudaSuccess;
  for (int i = 0; i < replays && launched == cudaSuccess; i++)
    launched = cudaGraphLaunch(exec, stream);
  const cudaError_t finished = cudaStreamSynchronize(stream);
  cudaGraphExecDestroy(exec);
  must(launched, "cudaGraphLaunch");
  must(finished, "cudaStreamSynchronize after a graph");
  return status;
}

// Runs one call: `replays` 0 launches directly. Returns 0, 100 + the launcher's status, or 1 with a message.
template <class F>
int run(Arrays &arrays, size_t workspace_bytes, int replays, char *message, int size, F call) {
  try {
    const Buffer workspace(workspace_bytes ? workspace_bytes : 1);
    const Stream stream;
    arrays.upload();
    must(cudaDeviceSynchronize(), "cudaDeviceSynchronize before the call");
    const auto launch = [&](cudaStream_t on) { return call(workspace.data(), on); };
    const int status = replays ? replay(stream.get(), replays, launch) : launch(stream.get());
    must(cudaStreamSynchronize(stream.get()), "the kernels");
    workspace.check_guard("the workspace");
    arrays.download();
    return status ? 100 + status : 0;
  } catch (const std::exception &error) {
    snprintf(message, static_cast<size_t>(size), "%s", error.what());
    return 1;
  }
}

} // namespace harness
