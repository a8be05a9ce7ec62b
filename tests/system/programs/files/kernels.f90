! Ways in which Fortran's runtime uses files, for fortran.c: each rank has files of its own. A logical unit is open for each
! (10 + row), but for those that are opened in each step.
module kernels
  use iso_c_binding
  implicit none
contains
  pure integer function value(who, step)
    integer, intent(in) :: who, step
    value = mod(who * 10007 + step * 7919 + 12345, 65521)
  end function

  ! Formatted lines one after the other; read again from the beginning. Returns how many are wrong.
  integer(c_int) function sequential(name, length, who, step) bind(c)
    character(kind=c_char), intent(in) :: name(*)
    integer(c_int), value :: length, who, step
    integer :: s, number, when, status
    if (step == 0) open(11, file=text(name, length), status='replace', form='formatted', action='readwrite')
    write(11, '(i6,1x,i8)') step, value(who, step)
    flush(11)
    rewind(11)
    sequential = 0
    do s = 0, step
      read(11, '(i6,1x,i8)', iostat=status) when, number
      if (status /= 0 .or. when /= s .or. number /= value(who, s)) sequential = sequential + 1
    end do
  end function

  ! Lines at the end of a file that is opened and closed in each step.
  integer(c_int) function appended(name, length, who, step) bind(c)
    character(kind=c_char), intent(in) :: name(*)
    integer(c_int), value :: length, who, step
    logical :: is_there
    inquire(file=text(name, length), exist=is_there)
    appended = merge(0, 1, is_there .eqv. step > 0)
    open(12, file=text(name, length), status='unknown', position='append', action='write')
    write(12, '(i6,1x,i8)') step, value(who, step)
    close(12)
  end function

  ! Records by their number: each step adds to all of them.
  integer(c_int) function direct(name, length, who, step) bind(c)
    character(kind=c_char), intent(in) :: name(*)
    integer(c_int), value :: length, who, step
    integer :: record, number, s
    integer(8) :: sums(64), wanted
    if (step == 0) open(13, file=text(name, length), status='replace', access='direct', form='unformatted', recl=512)
    direct = 0
    do record = 1, 4
      sums = 0
      if (step > 0) read(13, rec=record) sums
      wanted = 0
      do s = 0, step - 1
        wanted = wanted + value(who, s) * record
      end do
      number = count(sums /= wanted)
      direct = direct + number
      sums = sums + value(who, step) * record
      write(13, rec=record) sums
    end do
    flush(13)
  end function

  ! Bytes at a position, by stream access, and unformatted records that are written again in each step.
  integer(c_int) function streamed(name, length, who, step) bind(c)
    character(kind=c_char), intent(in) :: name(*)
    integer(c_int), value :: length, who, step
    integer :: number, place
    if (step == 0) open(14, file=text(name, length), status='replace', access='stream', form='unformatted')
    write(14, pos=1 + 4 * step) value(who, step)
    flush(14)
    read(14, pos=1 + 4 * (step / 2)) number
    inquire(14, pos=place)
    streamed = merge(0, 1, number == value(who, step / 2) .and. place == 5 + 4 * (step / 2))
    open(15, file=text(name, length) // '.again', status='replace', form='unformatted')
    write(15) step, value(who, step)
    close(15)
    open(15, file=text(name, length) // '.again', status='old', form='unformatted')
    read(15) number
    close(15)
    if (number /= step) streamed = streamed + 1
  end function

  ! A file without a name of ours, which the runtime removes.
  integer(c_int) function scratch(name, length, who, step) bind(c)
    character(kind=c_char), intent(in) :: name(*)
    integer(c_int), value :: length, who, step
    integer :: s, number
    if (step == 0) open(16, status='scratch', form='unformatted', access='direct', recl=4)
    write(16, rec=step + 1) value(who, step)
    scratch = 0
    do s = 0, step
      read(16, rec=s + 1) number
      if (number /= value(who, s)) scratch = scratch + 1
    end do
  end function

  pure function text(name, length)
    character(kind=c_char), intent(in) :: name(*)
    integer(c_int), intent(in) :: length
    character(len=length) :: text
    integer :: at
    do at = 1, length
      text(at:at) = name(at)
    end do
  end function
end module
